"""An engine's description of itself, and its counters."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from kvtier import LLM, SamplingParams
from kvtier.blocks.hashing import block_hashes
from kvtier.engine.client import EngineClient
from kvtier.engine.config import EngineConfig
from kvtier.engine.device.runner import Constrain, Runner, Submitted, TokenResult
from kvtier.engine.engine import Engine
from kvtier.engine.process.hello import count_parameters, hello_of
from kvtier.engine.schedule.step import Step
from kvtier.errors import EngineStopped, InvalidParameter
from kvtier.models.loading import load_model
from kvtier.testing.tiny_models import VOCAB_SIZE, make_tiny_tokenizer, save_tiny_model
from tests.support.chat_templates import ONE_CALL
from tests.support.tiered_engines import tokens

torch.set_num_threads(1)

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
BLOCK_BYTES = 8192


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(path, "qwen3")
    return path


def open_llm(folder: Path, **settings: object) -> LLM:
    values = {"device": "cpu", "dtype": "float32", "kv_cache_space": 64 * BLOCK_BYTES, "always_load": True}
    return LLM(str(folder), **{**values, **settings})


def counted(engine: Engine) -> dict[str, float]:
    """Every sample by its name, labels behind it."""
    return {
        " ".join([sample.name.removeprefix("kvtier_engine_"), *sample.labels.values()]): sample.value
        for family in engine.metrics.registry.collect()
        for sample in family.samples
    }


# --- what it is -------------------------------------------------------------------------------------------------------


def test_an_engine_knows_what_it_is(folder: Path) -> None:
    with open_llm(folder) as llm:
        hello = hello_of(llm.engine, name="engine-0", model="tiny", started_at=0.0)

        assert hello.namespace == llm.engine.namespace.hex()
        assert hello.chat_template == llm.engine.tokenizer.chat_template
        assert hello.takes_several_calls
    assert (hello.engine, hello.model, hello.started_at) == ("engine-0", "tiny", 0.0)
    assert (hello.architecture, hello.dtype, hello.quantization) == ("Qwen3ForCausalLM", "float32", "")
    assert (hello.vocab_size, hello.device, hello.has_tokenizer) == (VOCAB_SIZE, "cpu", True)
    assert (hello.block_tokens, hello.num_blocks, hello.kv_bytes) == (16, 64, 64 * BLOCK_BYTES)
    assert hello.max_model_len == 512
    assert hello.weights_bytes == hello.num_parameters * 4


@pytest.mark.parametrize(("schedule", "num_late"), [("auto", 0), ("sync", 0), ("async-1", 1), ("async-2", 2)])
def test_a_token_comes_as_many_steps_late_as_the_schedule_says(folder: Path, schedule: str, num_late: int) -> None:
    with open_llm(folder, schedule=schedule) as llm:
        llm.engine.add("one", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))

        news = [bool(llm.engine.step()) for _ in range(num_late + 1)]

    assert news == [False] * num_late + [True]


def test_a_template_that_refuses_a_second_call_is_told(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1)
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = ONE_CALL
    tokenizer.save_pretrained(tmp_path)
    with open_llm(tmp_path) as llm:
        hello = hello_of(llm.engine, name="engine-0", model="tiny", started_at=0.0)

    assert not hello.takes_several_calls


def test_a_model_without_a_tokenizer_has_none_and_no_template(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", num_layers=1, with_tokenizer=False)
    with open_llm(tmp_path) as llm:
        hello = hello_of(llm.engine, name="engine-0", model="tiny", started_at=0.0)

    assert (hello.has_tokenizer, hello.chat_template) == (False, "")


@pytest.mark.parametrize("family", ["qwen2", "glm4"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_parameters_are_counted_as_the_makers_do(tmp_path: Path, family: str, is_tied: bool) -> None:
    theirs = save_tiny_model(tmp_path, family, tie_word_embeddings=is_tied)

    plain = load_model(tmp_path, device="cpu").model
    small = load_model(tmp_path, device="cpu", quantization="fp8").model

    assert count_parameters(plain) == count_parameters(small) == theirs.num_parameters()


# --- what it has done -------------------------------------------------------------------------------------------------


def test_tokens_and_ends_are_counted(folder: Path) -> None:
    prompt = tokens(1, 100)
    with open_llm(folder) as llm:
        llm.generate([prompt], GREEDY, progress=False)
        llm.generate([prompt], SamplingParams(n=2, seed=1, max_tokens=3, ignore_eos=True), progress=False)
        found = counted(llm.engine)

    assert found["prompt_tokens_total"] == 300
    assert found["cached_tokens_total device"] == 2 * 96
    assert found["output_tokens_total"] == 5 + 2 * 3
    assert found["finished_requests_total length"] == 3
    assert found["preemptions_total"] == 0
    assert found["steps_total"] >= 5 + 3
    assert (found["running_requests"], found["waiting_requests"]) == (0, 0)
    assert (found["used_blocks"], found["held_blocks"], found["blocks"]) == (0, 6, 64)


def test_tokens_from_tiers_are_counted_by_tier(folder: Path) -> None:
    with open_llm(folder, swap_space=1 << 20, block_manager="naive") as llm:
        for _ in range(2):
            llm.generate([tokens(1, 100)], GREEDY, progress=False)
            assert llm.engine.transfer.settle(10.0)
        found = counted(llm.engine)

    assert found["cached_tokens_total host"] == 96
    assert found["cached_tokens_total device"] == 0


def test_a_prompt_that_warms_saves_no_time_and_is_no_request_of_a_client(folder: Path) -> None:
    with open_llm(folder) as llm:
        for end in (48, 96, 100):
            llm.engine.add(f"warm-{end}", tokens(1, end), GREEDY, warms=True)
            while llm.engine.has_requests:
                llm.engine.step()
        found = counted(llm.engine)
        assert found["prompt_tokens_total"] == 100
        assert found.get("cached_tokens_total device", 0) == 0
        assert found["saved_seconds_total"] == 0
        with pytest.raises(InvalidParameter, match="no request with the id warm-96"):
            llm.engine.explain("warm-96")

        llm.generate([tokens(1, 100)], GREEDY, progress=False)
        assert counted(llm.engine)["cached_tokens_total device"] == 96


def test_prompts_count_for_the_prefixes_they_begin_with_but_not_those_that_warm(folder: Path) -> None:
    with open_llm(folder) as llm:
        [end] = block_hashes(llm.engine.namespace, tokens(1, 96), 16)[-1:]
        assert llm.engine.uses.take([end]) == []
        llm.engine.add("warm", tokens(1, 100), GREEDY, warms=True)
        while llm.engine.has_requests:
            llm.engine.step()
        assert llm.engine.uses.take([end]) == []

        two = SamplingParams(temperature=0.0, max_tokens=2, n=2)
        llm.generate([tokens(1, 100), tokens(1, 110), tokens(1, 90)], two, progress=False)
        [(used, count, ago_s)] = llm.engine.uses.take([end])
        assert (used, count, ago_s >= 0) == (end, 2, True)


def test_levels_are_those_of_now(folder: Path) -> None:
    with open_llm(folder, max_num_requests=1) as llm:
        engine = llm.engine
        engine.add("one", tokens(1, 40), GREEDY)
        engine.add("two", tokens(2, 40), GREEDY)
        before = counted(engine)
        engine.step()
        meanwhile = counted(engine)
        engine.abort("one")
        engine.abort("two")
        after = counted(engine)

    assert (before["running_requests"], before["waiting_requests"], before["used_blocks"]) == (0, 2, 0)
    assert (meanwhile["running_requests"], meanwhile["waiting_requests"], meanwhile["used_blocks"]) == (1, 1, 3)
    assert (after["running_requests"], after["waiting_requests"], after["used_blocks"]) == (0, 0, 0)
    assert after["finished_requests_total abort"] == 2
    assert after["prompt_tokens_total"] == 40, "the other one never got its turn"


def test_preemptions_are_counted(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with open_llm(folder, kv_cache_space=10 * BLOCK_BYTES) as llm:
        llm.generate([tokens(seed, 40) for seed in range(4)], params, progress=False)
        found = counted(llm.engine)

    assert found["preemptions_total"] > 0
    assert found["output_tokens_total"] == 4 * 60
    assert found["prompt_tokens_total"] == 4 * 40


def test_what_a_failure_ends_is_counted_as_that(folder: Path) -> None:
    with open_llm(folder) as llm:
        engine = llm.engine
        engine.add("one", tokens(1, 40), GREEDY)
        engine.step()
        engine.runner.submit = lambda step, constrain: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        found = counted(engine)

    assert found["finished_requests_total error"] == 1
    assert (found["running_requests"], found["used_blocks"]) == (0, 0)


def test_metrics_can_be_read_while_requests_run(folder: Path) -> None:
    with EngineClient(open_llm(folder).engine) as client:
        streams = [client.submit(tokens(seed, 50), GREEDY) for seed in range(20)]
        while client.num_requests:
            assert 0 <= counted(client.engine)["used_blocks"] <= 64
        assert all(stream.wait() for stream in streams)
        assert counted(client.engine)["output_tokens_total"] == 100


def test_a_registry_can_be_given_and_keeps_no_engine_alive(folder: Path) -> None:
    registry = CollectorRegistry()
    engine = Engine(EngineConfig(model=str(folder), device="cpu", kv_cache_space=64 * BLOCK_BYTES), registry)
    assert engine.metrics.registry is registry
    gone = weakref.ref(engine)
    gc.disable()
    try:
        del engine
        assert gone() is None, "its memory comes back at once"
    finally:
        gc.enable()


def test_how_the_makers_want_it_sampled_is_told_as_far_as_it_can_be_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model(tmp_path, "qwen2", num_layers=1)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 1.7, "eos_token_id": 256}')
    with open_llm(tmp_path) as llm:
        hello = hello_of(llm.engine, name="one", model="tiny", started_at=0.0)

    assert hello.default_options == {"temperature": 0.7}
    assert "top_p must be" in caplog.text


# --- the collector ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_done", [True, False])
def test_garbage_is_collected_while_the_device_computes(
    folder: Path, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not while a caller waits for tokens that have arrived."""
    events: list[str] = []
    wait = Submitted.wait

    def wait_and_tell(submitted: Submitted) -> list[TokenResult]:
        events.append("wait")
        return wait(submitted)

    monkeypatch.setattr(Submitted, "is_done", property(lambda _: is_done))
    monkeypatch.setattr(Submitted, "wait", wait_and_tell)
    monkeypatch.setattr("kvtier.engine.engine.collect_young", lambda: events.append("collect"))
    with open_llm(folder) as llm:
        llm.generate([tokens(0, 20)], GREEDY)

    assert events == (["wait"] if is_done else ["collect", "wait"]) * 5


# --- steps ahead ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_graph_tokens", "most"), [(1024, 3), (0, 2)])
def test_tokens_are_looked_at_before_a_third_long_step_is_handed_over(
    folder: Path, max_graph_tokens: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has enough to do with two of them, also of those that sample nothing: chunks of a prompt."""
    num_under_way: list[int] = []
    submit, wait = Runner.submit, Submitted.wait
    under_way: list[Submitted] = []

    def submit_and_count(runner: Runner, step: Step, constrain: Constrain | None) -> Submitted:
        submitted = submit(runner, step, constrain)
        under_way.append(submitted)
        num_under_way.append(len(under_way))
        return submitted

    def wait_and_count(submitted: Submitted) -> list[TokenResult]:
        under_way.remove(submitted)
        return wait(submitted)

    with open_llm(folder) as llm:
        expected = llm.generate([tokens(0, 20)], GREEDY)
    monkeypatch.setattr("kvtier.engine.device.runner.MAX_GRAPH_TOKENS", max_graph_tokens)
    monkeypatch.setattr(Runner, "submit", submit_and_count)
    monkeypatch.setattr(Submitted, "wait", wait_and_count)
    with open_llm(folder, schedule="async-2", max_num_batched_tokens=5) as llm:
        found = llm.generate([tokens(0, 20)], GREEDY)

    assert num_under_way[:4] == [1, 2, most, most]
    assert max(num_under_way) == most
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]


def test_a_closed_engine_takes_no_prompt(folder: Path) -> None:
    engine = Engine(EngineConfig(model=str(folder), device="cpu", kv_cache_space=1 << 20, swap_space=1 << 20))
    engine.close()
    with pytest.raises(EngineStopped, match="this engine was closed"):
        engine.add("late", tokens(0, 20), GREEDY)
    engine.close()
