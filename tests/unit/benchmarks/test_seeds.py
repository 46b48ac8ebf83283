"""The documents' tables: every one has a command, a place on the page and, unless it is named here, a result."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import store_cost
from benchmarks.offloading_KV_cache import test_long_prefill as offloading_long_prefill
from benchmarks.offloading_KV_cache import test_swap_in as swap_in
from benchmarks.offloading_KV_cache import test_swap_out as swap_out
from benchmarks.prefix_caching import baseline
from benchmarks.prefix_caching import test_long_prefill as prefix_long_prefill
from benchmarks.remote_kv_cache import test_long_prefill as remote_long_prefill
from benchmarks.remote_kv_cache import test_transfer_in as transfer_in
from benchmarks.remote_kv_cache import test_transfer_out as transfer_out
from benchmarks.seeds import __main__ as seeds
from benchmarks.seeds import page, readings
from benchmarks.seeds.drawing import DRAWINGS
from benchmarks.seeds.page import NOT_RUN, SECTIONS, beside, make_page
from benchmarks.seeds.registry import CPU, GPU, OTHERS, TABLES, Run, Table, runs_on, tables_of
from benchmarks.seeds.running import missing_results, run_tables
from benchmarks.seeds.seed_tables import seed_tables
from benchmarks.seeds.staleness import age_of, measured_by

NAMED = {
    "s0-memory-io",
    "s0-zmq",
    "s0-server",
    "s0-transfer-out",
    "s0-transfer-in-off",
    "s0-transfer-in-on",
    "s0-long-prefill",
    "s1-prefills",
    "s1-swap",
    "s1-profiler-swap-out",
    "s1-profiler-swap-in",
    "s1-swap-out",
    "s1-swap-in",
    "s1-long-prefill",
    "s2-speed",
    "s2-stress",
    "s3-baseline",
    "s3-long-prefill",
    "s4-file-store",
    "s4-processes",
}
RESULT = {
    "benchmark": "prefix_caching.baseline",
    "at": "2026-01-01T00:00:00+00:00",
    "commit": "0123456789ab",
    "machine": {"cpu": "a CPU", "arch": "x86_64", "cores": 2},
    "settings": {"bars": {"speed": ">= 1"}},
    "rows": [],
    "figures": {"speed": 2.0},
}


class ScriptTable(Table):
    """A table that is a few lines of Python; `FILE` in them is where its result goes."""

    def command(self, run, target, *, is_tiny=False):
        return [sys.executable, "-c", self.module.replace("FILE", repr(str(target)))]


def table(name, script, seconds=30):
    return ScriptTable(name, "a table", script, (Run((), (), {CPU: seconds}),), needs=(CPU,))


def write(document, status=0):
    return f"import json, sys; json.dump({document!r}, open(FILE, 'w')); print('said this'); sys.exit({status})"


# --- the tables -------------------------------------------------------------------------------------------------------


def test_every_table_of_the_documents_has_a_command_a_section_and_its_pictures_a_drawing():
    assert {one.name for one in TABLES} == NAMED == {section.name for section in SECTIONS}
    assert {name for one in TABLES for name in one.pictures} == DRAWINGS.keys()
    assert len({one.name for one in (*TABLES, *OTHERS)}) == len(TABLES) + len(OTHERS)
    for one in (*TABLES, *OTHERS):
        for machine in one.needs:
            assert all(machine in run.seconds for run in one.runs)
            assert all(run.seconds[machine] <= 300 for run in one.runs if machine == GPU), "two share ten minutes"


def test_every_table_has_a_result():
    assert not missing_results(TABLES)


def test_the_page_is_what_the_results_make():
    assert seeds.main(["page", "--check"]) == 0, "python -m benchmarks.seeds page"


@pytest.mark.sampled(every=9)
@pytest.mark.parametrize("is_tiny", [True, False])
@pytest.mark.parametrize(
    ("one", "run"),
    [(one, run) for one in (*TABLES, *OTHERS) for run in one.runs],
    ids=lambda value: value.name if isinstance(value, Table) else value.part,
)
def test_every_runs_options_are_known_to_its_benchmark(one, run, is_tiny, monkeypatch, tmp_path, capsys):
    """Help is shown, and the program ends, only after all options before it were understood."""
    module = importlib.import_module(f"benchmarks.{one.module}")
    monkeypatch.setattr("sys.argv", ["x", *one.command(run, tmp_path / "r.json", is_tiny=is_tiny)[3:], "--help"])

    with pytest.raises(SystemExit) as ending:
        module.main()

    assert ending.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_names_choose_tables_and_an_unknown_one_is_one_sentence(capsys):
    assert [one.name for one in tables_of(["s1-swap", "s2-speed"])] == ["s2-speed", "s1-swap"]
    assert seeds.main(["run", "s9-none"]) == 2
    assert capsys.readouterr().err.startswith("error: no such table: s9-none; there are s2-stress")


def test_a_machine_first_runs_what_is_needed_of_it():
    names = [one.name for one, _ in runs_on(CPU, list(TABLES))]

    assert names[:2] == ["s0-memory-io", "s0-server"]
    assert "s0-server" in [one.name for one, _ in runs_on(GPU, list(TABLES))][-4:]


# --- their parameters -------------------------------------------------------------------------------------------------

TENTHS = tuple(range(0, 101, 10))
OUTPUTS = (2, 4, 8, 16, 32, 64, 128)
STEPS = (1024, 768, 512, 384, 256, 128, 64, 32)
BOTH = {"prefix_caching", "disable_prefix_caching"}
STORE = {"prompts": 4, "input_tokens": 8192, "batched_tokens": STEPS, "most_steps": None}
HITS = {"prompts": 1000, "input_tokens": 1000, "max_num_batched_tokens": 1024, "hit_rates": TENTHS}
LONG = {"prompts": 10, "input_tokens": 10240, "max_num_batched_tokens": 1024, "outputs": OUTPUTS}
PARAMETERS = {
    "swap_out": (swap_out.main, store_cost, "Qwen2.5-3B", STORE),
    "transfer_out": (transfer_out.main, store_cost, "Qwen2.5-3B", STORE),
    "swap_in": (swap_in.main, swap_in, "Qwen2.5-3B", {**HITS, "output_tokens": 24}),
    "transfer_in": (transfer_in.main, transfer_in, "Qwen2.5-3B", {**HITS, "output_tokens": 24}),
    "baseline": (baseline.main, baseline, "Qwen2.5-3B", HITS),
    "remote_long_prefill": (remote_long_prefill.main, remote_long_prefill, "Qwen2.5-7B", LONG),
    "offloading_long_prefill": (offloading_long_prefill.main, offloading_long_prefill, "Qwen2.5-7B", LONG),
    "prefix_long_prefill": (prefix_long_prefill.main, prefix_long_prefill, "Qwen2.5-7B", LONG),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_without_options_a_benchmark_has_the_documents_parameters_on_a_gpu(name, monkeypatch):
    main, module, shape, expected = PARAMETERS[name]
    sizes = []

    def only_note(arguments, size, *others):
        assert arguments.model_shape == shape
        sizes.append(size)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(module, "measure", only_note)
    main(["--device", "cuda"])

    (size,) = sizes
    assert {name: getattr(size, name) for name in expected} == expected
    if module is not swap_in and hasattr(size, "managers") and module is not prefix_long_prefill:
        assert set(size.managers) == BOTH


def test_hit_rates_share_an_engine_as_far_as_the_server_has_room_for_their_prompts():
    size = transfer_in.Size(1000, 1000, 24, 1, TENTHS, ("prefix_caching",), 256, 1024)

    groups = transfer_in._groups(size)

    assert sorted(rate for group in groups for _, rate in group) == list(TENTHS)
    assert len(groups) == 6
    assert all(sum(100 - rate for _, rate in group) <= 100 for group in groups)


# --- running ----------------------------------------------------------------------------------------------------------


def run(tables, folder, **others):
    settings = {"minutes": 10.0, "is_tiny": False, "only_missing": False, **others}
    return run_tables(tables, CPU, folder, **settings)


def test_one_that_fails_does_not_keep_the_next_from_running(tmp_path, capsys):
    fails = table("s9-fails", "print('what went wrong'); 1 / 0")
    late = table("s9-late", write(RESULT), seconds=10_000)
    breaks = table("s9-breaks", f"import json; json.dump({RESULT!r}, open(FILE, 'w')); 1 / 0")
    misses = table("s9-misses", write({**RESULT, "settings": {"bars": {"speed": ">= 3"}}}, status=1))
    good = table("s9-good", write(RESULT))

    status = run([fails, late, breaks, misses, good], tmp_path)

    shown = capsys.readouterr().err
    assert status == 1
    assert "ZeroDivisionError" in shown
    assert "no time left" in shown
    results = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".json")
    assert results == ["cpu_s9_good.json", "cpu_s9_misses.json"]
    assert (tmp_path / "cpu_s9_breaks.partial").exists()
    assert "what went wrong" in (tmp_path / "cpu_s9_fails.log").read_text()


def test_only_what_is_missing_runs_unless_told(tmp_path):
    one = table("s9-good", write(RESULT))
    kept = tmp_path / "cpu_s9_good.json"
    kept.write_text(json.dumps({**RESULT, "commit": "before"}))

    assert run([one], tmp_path, only_missing=True) == 0
    assert json.loads(kept.read_text())["commit"] == "before"
    assert run([one], tmp_path) == 0
    assert json.loads(kept.read_text())["commit"] == RESULT["commit"]


# --- ages -------------------------------------------------------------------------------------------------------------


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder, path):
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(file.read_text() + "more\n" if file.exists() else "some\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a change")
    return git(folder, "rev-parse", "--short=12", "HEAD")


def test_a_result_is_older_once_what_it_measures_has_changed(tmp_path):
    git(tmp_path, "init", "-q")
    at = commit(tmp_path, "src/kvtier/engine/device/runner.py")
    result = tmp_path / "result.json"
    result.write_text(json.dumps({**RESULT, "commit": f"{at}-dirty"}))

    commit(tmp_path, "src/kvtier/api/server.py")
    assert age_of(result, tmp_path).changes == 0
    assert age_of(result, tmp_path).sentence == "as new as what it measures"
    commit(tmp_path, "src/kvtier/engine/device/runner.py")
    commit(tmp_path, "benchmarks/prefix_caching/baseline.py")
    assert age_of(result, tmp_path).sentence == "older: 2 changes since of what it measures"

    result.write_text(json.dumps({**RESULT, "commit": "unknown"}))
    assert age_of(result, tmp_path).changes is None


def test_every_benchmark_that_is_kept_measures_something_that_is_there():
    names = {one.module for one in (*TABLES, *OTHERS)}
    for path in (path for name in names for path in measured_by(name)):
        assert (page.ROOT / path).exists(), path


def test_the_list_names_results_and_does_not_fail_for_old_ones(capsys):
    assert seeds.main(["--list", "--all"]) == 0

    shown = capsys.readouterr()
    assert "s2-stress" in shown.out
    assert "benchmarks/results/h200_house_restart.json: " in shown.out
    assert "results are missing" in shown.err


# --- the page and the pictures ----------------------------------------------------------------------------------------


def test_a_documents_table_is_read_as_it_stands():
    tables = seed_tables()

    assert tables["s0-memory-io"].cell("Llama-3.1-8B", "swap out (s)") == "0.10"
    assert tables["s3-baseline"].cell("100", "yoco-async-2") == "107.12"
    assert tables["s2-stress"].cell("1", "2") == ""
    assert tables["s4-ssd-tokens"].rows[""] == ("605", "324")
    for one in tables.values():
        assert all(len(cells) == len(one.columns) for cells in one.rows.values())


def test_a_cell_is_ours_with_the_documents_in_brackets():
    cells = readings.triangle([{"round": 2, "document": 1, "ttft_s": 0.1234}])

    lines = beside("s2-stress", cells)

    assert lines[3] == f"| 2 | 0.123 (0.33) | {NOT_RUN} (33.97) |  |  |  |  |"


def long_rows():
    ways = ("no cache", "device cache", "host, device cache on", "host, device cache off")
    return [
        {"N": count, "what": way, "rounds": [1.0] if way == "no cache" else [1.0, 2.0, 3.0]}
        for way in ways
        for count in OUTPUTS
    ]


def test_a_table_with_all_rows_has_no_cell_that_was_not_run():
    assert NOT_RUN not in "\n".join(beside("s1-long-prefill", readings.offloading_long_prefill(long_rows())))


def test_a_page_without_results_says_so_and_one_with_results_names_machine_and_commit(tmp_path):
    assert "not run yet" in make_page(tmp_path)

    one = next(one for one in TABLES if one.name == "s1-long-prefill")
    document = {**RESULT, "settings": {"device": "NVIDIA H200"}, "rows": long_rows()}
    (file,) = one.results(GPU, tmp_path)
    file.write_text(json.dumps(document))

    text = make_page(tmp_path)
    assert "Measured on: NVIDIA H200, 2 cores of a CPU (x86_64), commit 0123456789ab, 2026-01-01." in text


def test_pictures_are_drawn_from_results_alone(tmp_path):
    settings = {"shape": "small", "device": "a device", "prompt_tokens": 100, "input_tokens": 10, "output_tokens": 2}
    spans = [[0.0, 1.0], [2.0, 3.5]]
    rows = {
        "s0-transfer-in-off": [{"hit %": rate, "first QPS": 1.0, "second QPS": 2.0} for rate in (0, 50)],
        "s1-profiler-swap-out": [{"copies": 1}, *({"lane": lane, "ms": spans} for lane in ("compute", "copies"))],
        "s1-profiler-swap-in": [
            {"lane": f"{lane}{end}", "ms": spans} for lane in ("compute", "copies") for end in ("", ", close")
        ],
        "s1-swap-in": [{"hit %": rate, "no cache": 1.0, "device hit": 3.0} for rate in (0, 50)],
        "s2-stress": [
            {"round": number, "document": place, "ttft_s": 0.5 * number, "cached": {}}
            for number in (1, 2)
            for place in range(1, number + 1)
        ],
        "s3-baseline": [{"part": "table", "hit %": rate, "naive-sync": 1.0, "yoco-async-2": 2.0} for rate in (0, 50)],
    }
    expected = set()
    for one in TABLES:
        if one.name in rows:
            document = {**RESULT, "settings": settings, "rows": rows[one.name]}
            one.results(GPU, tmp_path)[0].write_text(json.dumps(document))
            expected |= {f"{name}.png" for name in one.pictures}

    # In a process of its own: matplotlib keeps fonts open.
    command = [sys.executable, "-m", "benchmarks.seeds", "draw", "--out", str(tmp_path)]
    subprocess.run(command, cwd=page.ROOT, check=True, capture_output=True)

    drawn = list(tmp_path.glob("*.png"))
    assert {path.name for path in drawn} == expected
    assert all(2_000 < path.stat().st_size < 200_000 for path in drawn)
