"""An engine with tiers that is interrupted between any two lines, forked, or never closed: nothing wrong is stored."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from pathlib import Path

import pytest

from kvtier import LLM, SamplingParams
from kvtier.engine.client import EngineClient
from kvtier.engine.device.runner import Submitted
from kvtier.errors import ConfigError, EngineStopped
from kvtier.testing.servers import cache_server
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.transfer.device_lease import DeviceLease
from tests.support.tiered_engines import tokens
from tests.support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SOME = [tokens(seed, 200) for seed in range(6)]
OTHERS = [tokens(seed, 200) for seed in range(10, 16)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "qwen2")
    return folder


def open_llm(model: Path, **settings: object) -> LLM:
    values: dict[str, object] = {"kv_cache_space": 4 << 20, "schedule": "sync", "always_load": True, **settings}
    return LLM(str(model), **values)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[list[int]]]:
    with LLM(str(model), kv_cache_space=4 << 20) as llm:
        return {"some": answers(llm, SOME), "others": answers(llm, OTHERS)}


def test_an_engine_that_is_closed_gives_back_what_its_steps_hold(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Submitted] = []
    monkeypatch.setattr(Submitted, "close", lambda step: closed.append(step))
    with open_llm(model, schedule="async-2") as llm:
        llm.engine.add("one", SOME[0], GREEDY)
        llm.engine.step()
        llm.engine.step()
        assert closed == []

    assert len(closed) == 2


def test_what_was_offered_before_an_interrupt_is_never_stored(
    model: Path, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_server() as server:
        with open_llm(model, cache_server=server.unix) as llm:

            def interrupted(*, is_last: bool = False) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr(llm.engine.transfer, "send", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    answers(llm, SOME)
            assert answers(llm, OTHERS) == expected["others"]
            assert answers(llm, SOME) == expected["some"]
        with open_llm(model, cache_server=server.unix) as llm:
            assert answers(llm, SOME) == expected["some"]
            assert answers(llm, OTHERS) == expected["others"]


class _InterruptedOnce(deque[DeviceLease]):
    num_taken = 0

    def popleft(self) -> DeviceLease:
        taken = super().popleft()
        self.num_taken += 1
        if self.num_taken == 3:
            raise KeyboardInterrupt
        return taken


def test_an_interrupt_while_blocks_are_taken_back_loses_none(
    model: Path, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(model, swap_space=1 << 20, kv_cache_space=40 * 8192) as llm:
        assert llm.engine.transfer.traffic is not None
        storing = llm.engine.transfer.traffic.storer
        monkeypatch.setattr(storing, "_copied", _InterruptedOnce(storing._copied))
        with pytest.raises(KeyboardInterrupt):
            answers(llm, 20 * OTHERS)
        assert answers(llm, SOME) == expected["some"]
        assert llm.engine.transfer.settle()
        llm.engine.step()  # takes back what was copied
        assert storing.num_held == 0


def test_an_interrupt_while_starting_over_is_made_up_for(
    model: Path, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_llm(model, swap_space=1 << 20) as llm:
        engine = llm.engine

        def interrupted() -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(engine, "_step", interrupted)
            patched.setattr(engine.transfer.traffic, "drain", interrupted)
            with pytest.raises(KeyboardInterrupt):
                answers(llm, OTHERS)
        assert answers(llm, SOME) == expected["some"]
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting


@pytest.mark.parametrize("settings", [{"swap_space": 1 << 20}, {"cache_server": "unix:/nowhere/kvtier.sock"}])
def test_a_forked_child_is_told_to_make_an_engine_of_its_own(model: Path, settings: dict[str, object]) -> None:
    with open_llm(model, **settings) as llm:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                answers(llm, SOME)
                said = "nothing"
            except EngineStopped as error:
                said = str(error)
            except BaseException as error:
                said = repr(error)
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            assert "make one after the fork" in file.read()
        os.waitpid(pid, 0)
        assert len(answers(llm, SOME)) == len(SOME)


def test_blocks_evicted_between_match_and_load_are_computed(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk far too small for what is asked: units that were there when they were matched are gone when they load."""
    prompts = [tokens(seed, 300) for seed in range(24)]
    with LLM(str(model), kv_cache_space=8 << 20) as llm:
        right = answers(llm, prompts)
    with cache_server("--folder", str(tmp_path / "disk"), "--disk", "2MiB", memory="1MiB") as server:
        with open_llm(model, cache_server=server.unix, block_manager="naive", kv_cache_space=8 << 20) as llm:
            for _ in range(4):
                assert answers(llm, prompts) == right
    assert not [record for record in caplog.records if record.exc_info], "a thread failed"


def test_an_engine_ends_with_its_client_or_with_the_last_reference(model: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with EngineClient(open_llm(model, swap_space=1 << 20).engine) as client:
        assert client.submit(SOME[0], GREEDY).wait()
    llm = open_llm(model, swap_space=1 << 20)
    assert answers(llm, SOME[:1])
    del llm
    gc.collect()
    wait_until(lambda: {thread.name for thread in threading.enumerate()} <= before)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cache_server": 5}, "cache_server must be an address"),
        ({"cache_server": ["unix:/tmp/x", "unix:/tmp/y"]}, "cache_server takes one address.*cluster:"),
        ({"swap_space": 1 << 70}, "cannot map an arena"),
        ({"swap_space": -1}, "swap_space must be"),
        ({"cache_server_timeout_s": "1"}, "cache_server_timeout_s must be"),
        ({"cache_server_timeout_s": float("nan")}, "cache_server_timeout_s must be"),
        ({"cache_server_ca_file": 5}, "cache_server_ca_file must be"),
        ({"cache_server_token": 5}, "cache_server_token must be"),
        ({"always_load": "yes"}, "always_load must be"),
        ({"salt": 5}, "salt must be"),
        ({"cache_server": "ftp://x"}, "ftp://x"),
    ],
)
def test_settings_that_cannot_work_get_a_sentence(model: Path, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_llm(model, **settings)
