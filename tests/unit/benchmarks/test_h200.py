"""The program that runs all GPU benchmarks: whatever one of them does, the others run and the table says so."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from benchmarks import h200, store_cost

RESULT = {"figures": {"speed": 2.0, "size": 1.0}, "settings": {"bars": {"speed": ">= 1"}}}


class ScriptPart(h200.Part):
    """A part that is a few lines of Python; `FILE` in them is where its result goes."""

    def command(self, target, *, is_tiny):
        return [sys.executable, "-c", self.module.replace("FILE", repr(str(target)))]


def part(name, script, expected_s=30):
    return ScriptPart(name, script, (), (), expected_s, also=("size",))


def write(document, status=0):
    return f"import json, sys; json.dump({document!r}, open(FILE, 'w')); print('said this'); sys.exit({status})"


GOOD = part("good", write(RESULT))
MISSES = part("misses", write({**RESULT, "settings": {"bars": {"speed": ">= 3", "other": ">= 1"}}}, status=1))
FAILS = part("fails", "print('what went wrong'); 1 / 0")


def test_one_that_fails_does_not_keep_the_next_from_running(tmp_path, capsys):
    status = h200.main(["--out", str(tmp_path)], [FAILS, MISSES, GOOD])

    shown = capsys.readouterr().err
    assert status == 1
    assert "fails: failed with status 1" in shown
    assert "ZeroDivisionError" in shown
    assert "misses: misses a bar" in shown
    assert "good: good" in shown
    assert "absent" in shown
    assert json.loads((tmp_path / "h200_good.json").read_text()) == RESULT
    assert "said this" in (tmp_path / "h200_good.log").read_text()


def test_only_good_parts_end_with_0(tmp_path):
    assert h200.main(["--out", str(tmp_path)], [GOOD]) == 0


def test_one_that_takes_too_long_is_ended_and_what_it_wrote_is_read(tmp_path):
    late = part(
        "late",
        f"import json, time\ntry:\n    time.sleep(60)\nfinally:\n    json.dump({RESULT!r}, open(FILE, 'w'))",
    )

    outcome = h200.run_part(late, tmp_path, 0.5, is_tiny=False)

    assert outcome.verdict == "took too long"
    assert outcome.figures == RESULT["figures"]


def test_no_part_begins_that_would_not_end_in_time(tmp_path, capsys):
    status = h200.main(["--out", str(tmp_path), "--minutes", "1"], [part("long", write(RESULT), 100), GOOD])

    assert status == 1
    assert not (tmp_path / "h200_long.json").exists()
    assert (tmp_path / "h200_good.json").exists()
    assert "no time left" in capsys.readouterr().err


def test_the_table_has_figures_with_bars_and_those_that_a_part_names():
    outcome = h200.Outcome(GOOD, 1.0, 0, RESULT)

    assert [(row["figure"], row["met"]) for row in h200.figure_rows(outcome)] == [("speed", "yes"), ("size", "")]


def test_parts_run_alone_by_name_and_unknown_ones_are_refused(tmp_path):
    assert h200.main(["--out", str(tmp_path), "good"], [FAILS, GOOD]) == 0

    with pytest.raises(SystemExit):
        h200.main(["nothing"], [GOOD])


@pytest.mark.parametrize("one", h200.PARTS, ids=lambda one: one.name)
@pytest.mark.parametrize("is_tiny", [True, False])
def test_every_parts_options_are_known_to_its_benchmark(one, is_tiny, monkeypatch, tmp_path, capsys):
    """Help is shown, and the program ends, only after all options before it were understood."""
    module = importlib.import_module(f"benchmarks.{one.module}")
    arguments = one.command(tmp_path / "result.json", is_tiny=is_tiny)[3:]

    with pytest.raises(SystemExit) as ending:
        module.main([*arguments, "--help"])

    assert ending.value.code == 0
    assert "--json" in capsys.readouterr().out


FIGURES = {
    "cold_n2",
    "cold_n8",
    "cold_n32",
    "cold_n128",
    "gpu_hit_n2",
    "gpu_hit_n8",
    "gpu_hit_n32",
    "gpu_hit_n128",
    "ttft_30k_gpu_hit_ms",
    "decode_long_over_h200_limit",
    "sweep_0",
    "sweep_30",
    "sweep_50",
    "sweep_80",
    "sweep_90",
    "sweep_100",
    "async2_over_sync_min",
    "copy_in_gbs",
    "copy_out_gbs",
    "copy_in_loaded_gbs",
    "copy_out_loaded_gbs",
    "prefill_loss",
    "swap_out_qps_gpu_min",
    "transfer_out_qps_gpu_min",
    "host_hit_n2",
    "host_hit_n8",
    "host_hit_n32",
    "host_ttft_30k_ms",
    "server_over_host",
    "disk_of_raw",
    "disk_decided_over_computing",
    "host_over_gpu_80",
    "decode_p99_growth",
    "fp8_prefill_x",
    "fp8_decode_x",
    "gptq_decode_x",
    "json_schema_x",
    "beside_json_schema_x",
}


def test_the_parts_hold_every_figure_of_an_h200_against_its_bar(monkeypatch):
    bars = {}

    def only_note(result, arguments, own_bars, act):
        assert result.settings["device"] == "NVIDIA H200"
        assert arguments.model_shape == "Qwen2.5-7B"
        bars.update(own_bars)
        return 0

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(store_cost, "conclude", only_note)
    for one in h200.PARTS:
        module = importlib.import_module(f"benchmarks.{one.module}")
        monkeypatch.setattr(module, "conclude", only_note, raising=False)
        assert module.main([*one.arguments, "--device", "cuda"]) == 0

    assert bars.keys() >= FIGURES
    assert bars["copy_in_gbs"] == ">= 51"
    assert bars["sweep_80"] == ">= 182.6"
