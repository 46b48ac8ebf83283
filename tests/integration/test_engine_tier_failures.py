"""Tiers that die, hang, are slow, come back or lie: every request ends with the same tokens, in bounded time.

Failures come during loads, during stores and between requests. Each is counted, and a tier that is well again is used
again. Engines here have no cache on the device, so that every prompt goes through the tiers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import LLM
from kvtier.cacheserver.config import CacheServerConfig
from kvtier.cacheserver.server import CacheServer
from kvtier.engine.answer import RequestOutput
from kvtier.errors import TierRefused
from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import save_tiny_model
from kvtier.tiers.host import HostTier
from kvtier.tiers.speeds import Speeds
from kvtier.transport.address import UnixAddress
from tests.support.actors import hung, restarted
from tests.support.faulty_files import FaultyFiles
from tests.support.lying_proxy import LIES, LyingProxy
from tests.support.tiered_engines import (
    BLOCK_BYTES,
    Asking,
    Question,
    ask,
    assert_nothing_held,
    assert_same_answers,
    cached_by_tier,
    cold,
    failures,
    full_blocks,
    open_engine,
    settled,
    tokens,
)
from tests.support.waiting import wait_until

torch.set_num_threads(1)

pytestmark = pytest.mark.sampled(every=2)

ASKED = [Question(tokens(seed, 180)) for seed in range(6)]
OTHERS = [Question(tokens(seed, 180)) for seed in range(100, 106)]
NUM_CACHED = sum(full_blocks(one.prompt) for one in ASKED)
_DATA_NAME = "blocks.kvtier"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def expected(model: Path) -> list[RequestOutput]:
    return cold(model, ASKED)


@pytest.fixture(scope="module")
def expected_of_others(model: Path) -> list[RequestOutput]:
    return cold(model, OTHERS)


@pytest.fixture(autouse=True)
def no_errors_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A failure of a tier is a warning; an error in the log is a bug."""
    caplog.set_level(logging.ERROR, logger="kvtier")
    yield
    said = [record.getMessage() + str(record.exc_info) for record in caplog.records if record.levelno >= logging.ERROR]
    caplog.clear()
    assert said == []


@pytest.fixture(params=["unix", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["always", pytest.param("measured", marks=pytest.mark.soak)])
def decision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _engine(model: Path, address: str, token: str | None, decision: str = "always", **settings: Any) -> LLM:
    return open_engine(
        model,
        block_manager="naive",
        cache_server=address,
        cache_server_token=token,
        always_load=decision == "always",
        **settings,
    )


@contextlib.contextmanager
def _served(model: Path, transport: str, decision: str = "always") -> Iterator[tuple[ServerProcess, LLM]]:
    with cache_server(tcp=True) as server:
        with _engine(model, getattr(server, transport), server.token, decision) as llm:
            yield server, llm


@contextlib.contextmanager
def _proxied(model: Path, decision: str = "always", **settings: Any) -> Iterator[tuple[LyingProxy, LLM]]:
    with cache_server(tcp=True) as server, LyingProxy(server.tcp) as proxy:
        with _engine(model, proxy.address, server.token, decision, **settings) as llm:
            yield proxy, llm


def _answered(llm: LLM, asked: list[Question], expected: list[RequestOutput]) -> dict[str, int]:
    """Ask and check the answers; what came from where. Nothing comes from the host's memory."""
    _forget_host(llm)
    outputs = ask(llm, asked)
    assert_same_answers(outputs, expected)
    return cached_by_tier(outputs)


def _forget_host(llm: LLM) -> None:
    """Over TCP, what was loaded or stored once is in the host's memory too."""
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    for guard in traffic.hierarchy.guards:
        if isinstance(guard.tier, HostTier):
            settled(llm)
            guard.tier.drop()


def _is_hit_again(llm: LLM, expected: list[RequestOutput]) -> bool:
    """Blocks of the server are used again; what it lost is stored again on the way."""
    found = _answered(llm, ASKED, expected)
    settled(llm)
    return found.get("server", 0) + found.get("disk", 0) >= NUM_CACHED // 2


def _warm(llm: LLM, expected: list[RequestOutput]) -> None:
    _answered(llm, ASKED, expected)
    settled(llm)


def _let_loading_pay(llm: LLM) -> None:
    """A model this small computes as fast as it is asked: let the decision take it for a larger one."""
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    speeds = Speeds()
    for num_tokens in (16, 64, 256):
        speeds.note_prefill([(0, num_tokens)], 0.0005 * num_tokens)
    traffic.decision.speeds = speeds


# --- killed and hung -----------------------------------------------------------------------------------------------


def test_a_server_killed_between_requests_costs_no_answer_and_is_used_again_once_it_is_back(
    model: Path, expected: list[RequestOutput], transport: str, decision: str
) -> None:
    with _served(model, transport, decision) as (server, llm):
        _warm(llm, expected)
        server.kill()
        before = failures(llm)
        for _ in range(3):
            assert _answered(llm, ASKED, expected).get("server", 0) == 0
        assert failures(llm) > before
        assert failures(llm, kind="unavailable") > 0
        with restarted(server):
            if decision == "always":
                wait_until(lambda: _is_hit_again(llm, expected))
            assert_nothing_held(llm)
            _answered(llm, ASKED, expected)


@pytest.mark.slow
def test_a_server_killed_at_any_moment_of_loads_and_stores_costs_no_answer(
    model: Path,
    expected: list[RequestOutput],
    expected_of_others: list[RequestOutput],
    transport: str,
    decision: str,
) -> None:
    chance = random.Random(3)
    with cache_server(tcp=True) as server, contextlib.ExitStack() as stack:
        running = server
        with _engine(model, getattr(server, transport), server.token, decision) as llm:
            for round_ in range(6):
                _warm(llm, expected)
                _forget_host(llm)
                with Asking(llm, (ASKED + OTHERS) if round_ % 2 else (OTHERS + ASKED)) as asking:
                    time.sleep(chance.uniform(0.0, 0.08))
                    running.kill()
                    outputs = asking.result()
                right = (expected + expected_of_others) if round_ % 2 else (expected_of_others + expected)
                assert_same_answers(outputs, right)
                running = stack.enter_context(restarted(server))
                wait_until(lambda: _is_up(llm))
            wait_until(lambda: decision != "always" or _is_hit_again(llm, expected))
            assert_nothing_held(llm)


def _is_up(llm: LLM) -> bool:
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    client: Any = traffic.hierarchy.guards[-1].tier.client  # type: ignore[attr-defined]
    return bool(client.is_up)


def test_a_hung_server_costs_bounded_time_and_is_used_again_when_it_goes_on(
    model: Path,
    expected: list[RequestOutput],
    expected_of_others: list[RequestOutput],
    transport: str,
    decision: str,
) -> None:
    with _served(model, transport, decision) as (server, llm):
        _warm(llm, expected)
        with hung(server):
            _answered(llm, ASKED, expected)
            _answered(llm, OTHERS, expected_of_others)
            assert failures(llm, kind="timeout") >= 1
            wait_until(lambda: not _is_up(llm))
            assert _answered(llm, ASKED, expected) == {}, "the breaker is open by now"
        wait_until(lambda: _is_up(llm))
        if decision == "always":
            wait_until(lambda: _is_hit_again(llm, expected))
        assert_nothing_held(llm)


def test_a_server_that_hangs_at_any_moment_of_loads_and_stores_costs_bounded_time(
    model: Path,
    expected: list[RequestOutput],
    expected_of_others: list[RequestOutput],
    transport: str,
    decision: str,
) -> None:
    chance = random.Random(4)
    with _served(model, transport, decision) as (server, llm):
        for _ in range(4):
            _warm(llm, expected)
            _forget_host(llm)
            with Asking(llm, ASKED + OTHERS) as asking:
                time.sleep(chance.uniform(0.0, 0.08))
                with hung(server):
                    outputs = asking.result()
            assert_same_answers(outputs, expected + expected_of_others)
            wait_until(lambda: _is_up(llm))
        wait_until(lambda: decision != "always" or _is_hit_again(llm, expected))
        assert_nothing_held(llm)


def test_an_engine_of_a_hung_server_closes_in_bounded_time(
    model: Path, expected: list[RequestOutput], transport: str
) -> None:
    with cache_server(tcp=True) as server:
        llm = _engine(model, getattr(server, transport), server.token)
        _warm(llm, expected)
        with hung(server):
            _answered(llm, OTHERS, cold(model, OTHERS))
            llm.close()


def test_an_engine_starts_without_a_server_and_uses_it_once_it_is_there(
    model: Path, expected: list[RequestOutput], transport: str
) -> None:
    with cache_server(tcp=True) as server:
        server.kill()
        with _engine(model, getattr(server, transport), server.token) as llm:
            assert _answered(llm, ASKED, expected) == {}
            with restarted(server):
                wait_until(lambda: _is_hit_again(llm, expected))
                assert_nothing_held(llm)


def test_an_engine_starts_beside_a_hung_server(model: Path, expected: list[RequestOutput], transport: str) -> None:
    with cache_server(tcp=True) as server:
        with hung(server):
            llm = _engine(model, getattr(server, transport), server.token)
            _answered(llm, ASKED, expected)
        with llm:
            wait_until(lambda: _is_hit_again(llm, expected))


def test_a_server_that_comes_back_empty_gets_the_blocks_again(
    model: Path, expected: list[RequestOutput], transport: str
) -> None:
    """No request comes while it is away: an old lease, arena or space must not be used for the new one."""
    with _served(model, transport) as (server, llm):
        _warm(llm, expected)
        server.kill()
        with restarted(server):
            wait_until(lambda: _is_hit_again(llm, expected))
            assert_nothing_held(llm)


# --- slow ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [2e3, 2e5, 5e6])
def test_a_slow_server_costs_bounded_time(
    model: Path, expected: list[RequestOutput], decision: str, bytes_per_s: float
) -> None:
    with _proxied(model, decision) as (proxy, llm):
        _warm(llm, expected)
        proxy.bytes_per_s = bytes_per_s
        for _ in range(3):
            _answered(llm, ASKED, expected)
        proxy.heal()
        wait_until(lambda: _is_up(llm))
        if decision == "always":
            wait_until(lambda: _is_hit_again(llm, expected))


def test_what_is_slower_than_computing_is_computed(model: Path, expected: list[RequestOutput]) -> None:
    with _proxied(model, "measured") as (proxy, llm):
        _warm(llm, expected)
        proxy.bytes_per_s = 1e5  # a block takes a tenth of a second: a busy machine computes it sooner
        wait_until(lambda: _answered(llm, ASKED, expected) == {})


def test_an_engine_of_a_slow_server_closes_in_bounded_time(model: Path, expected: list[RequestOutput]) -> None:
    with cache_server(tcp=True) as server, LyingProxy(server.tcp) as proxy:
        llm = _engine(model, proxy.address, server.token)
        _warm(llm, expected)
        proxy.bytes_per_s = 3e5
        with llm:
            for first in range(200, 248, 6):
                ask(llm, [Question(tokens(seed, 180)) for seed in range(first, first + 6)])


def test_an_interrupt_beside_a_slow_server_does_not_wait_for_it(model: Path, expected: list[RequestOutput]) -> None:
    """No copy touches the device any more: what is on its way from the host to the server is none of its business."""
    with _proxied(model) as (proxy, llm):
        _warm(llm, expected)
        proxy.bytes_per_s = 3e5
        for first in range(200, 248, 6):
            ask(llm, [Question(tokens(seed, 180)) for seed in range(first, first + 6)])
        submit = llm.engine.runner.submit
        llm.engine.runner.submit = _interrupted  # type: ignore[method-assign,assignment]
        with pytest.raises(KeyboardInterrupt):
            ask(llm, OTHERS)
        llm.engine.runner.submit = submit  # type: ignore[method-assign]
        proxy.heal()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_connections_cut_at_any_moment_cost_no_answer(
    model: Path, expected: list[RequestOutput], expected_of_others: list[RequestOutput], decision: str
) -> None:
    chance = random.Random(5)
    with _proxied(model, decision) as (proxy, llm):
        _warm(llm, expected)
        for _ in range(10):
            _forget_host(llm)
            with Asking(llm, ASKED + OTHERS) as asking:
                time.sleep(chance.uniform(0.0, 0.1))
                proxy.cut()
                assert_same_answers(asking.result(), expected + expected_of_others)
        wait_until(lambda: decision != "always" or _is_hit_again(llm, expected))
        assert_nothing_held(llm)


# --- lies ----------------------------------------------------------------------------------------------------------

KINDS_OF_LIES = {"wrong_checksums": "corrupt", "wrong_bytes": "corrupt", "swapped_blocks": "corrupt"}
HARMLESS = ("too_few_blocks",)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("lie", list(LIES))
def test_a_lying_server_changes_no_answer(
    model: Path, expected: list[RequestOutput], expected_of_others: list[RequestOutput], lie: str
) -> None:
    """During loads and during stores; afterwards it is trusted again."""
    with _proxied(model) as (proxy, llm):
        _warm(llm, expected)
        proxy.lie = LIES[lie]
        _answered(llm, ASKED, expected)
        _answered(llm, OTHERS, expected_of_others)
        new = [Question(tokens(seed, 100)) for seed in range(300, 303)]
        _answered(llm, new, cold(model, new))
        assert proxy.num_lies > 0
        if lie not in HARMLESS:
            assert failures(llm) > 0
        if lie in KINDS_OF_LIES:
            assert failures(llm, kind=KINDS_OF_LIES[lie]) > 0
        proxy.heal()
        wait_until(lambda: _is_up(llm))
        wait_until(lambda: _is_hit_again(llm, expected))
        assert_nothing_held(llm)


@pytest.mark.slow
def test_a_server_that_never_sends_its_blocks_whole_holds_up_nobody_for_long(
    model: Path, expected: list[RequestOutput]
) -> None:
    """It answers everything else: who is late is given up, and after a while it is not asked any more."""
    with _proxied(model, "measured") as (proxy, llm):
        _let_loading_pay(llm)
        _warm(llm, expected)
        proxy.lie = LIES["missing_bytes"]

        def is_late() -> bool:
            _answered(llm, ASKED, expected)
            return failures(llm, kind="late") > 0

        wait_until(is_late)  # a busy machine may have no time to ask at first
        for _ in range(6):
            _answered(llm, ASKED, expected)
        num_late = failures(llm, kind="late")
        _answered(llm, ASKED, expected)
        assert failures(llm, kind="late") == num_late, "it is not asked any more"


def test_a_server_of_another_protocol_version_is_no_server(model: Path, expected: list[RequestOutput]) -> None:
    """It is there when the engine starts, or takes the place of the one that was used."""
    with _proxied(model) as (proxy, llm):
        _warm(llm, expected)
        proxy.lie = LIES["another_version"]
        proxy.cut()
        _answered(llm, ASKED, expected)
        assert failures(llm) > 0
        proxy.heal()
        wait_until(lambda: _is_hit_again(llm, expected))


# --- the disk behind the server ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _disk_server(folder: Path, files: FaultyFiles | None = None) -> Iterator[str]:
    """A server in this process, whose files can be made to fail; little memory, so that blocks come from the disk."""
    socket = folder.parent / "kvtier.sock"
    config = CacheServerConfig(
        unix=UnixAddress(str(socket)), folder=folder, memory_bytes=1 << 20, file_bytes=32 << 20, keeps_memory=False
    )
    server = CacheServer(config, files=files)
    try:
        yield f"unix:{socket}"
    finally:
        server.close()


def _flushed(llm: LLM) -> None:
    settled(llm)
    traffic = llm.engine.transfer.traffic
    assert traffic is not None
    traffic.hierarchy.guards[-1].tier.client.flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize("operation", ["read_into", "write", "open", "allocate"])
def test_a_failing_disk_changes_no_answer_and_is_used_again(
    model: Path, expected: list[RequestOutput], tmp_path: Path, operation: str
) -> None:
    files = FaultyFiles()
    with _disk_server(tmp_path / "data", files) as address, _engine(model, address, None) as llm:
        _answered(llm, ASKED, expected)
        _flushed(llm)
        assert _answered(llm, ASKED, expected).get("disk", 0) > 0
        files.fail(operation, 5)
        for _ in range(3):
            _answered(llm, ASKED, expected)
            settled(llm)
        _answered(llm, OTHERS, cold(model, OTHERS))
        settled(llm)
        files.heal()
        wait_until(lambda: _is_hit_again(llm, expected))
        assert_nothing_held(llm)


@pytest.mark.slow
def test_a_slow_disk_costs_bounded_time(
    model: Path, expected: list[RequestOutput], tmp_path: Path, decision: str
) -> None:
    files = FaultyFiles()
    with _disk_server(tmp_path / "data", files) as address, _engine(model, address, None, decision) as llm:
        _answered(llm, ASKED, expected)
        _flushed(llm)
        files.delay_s = 0.3
        for _ in range(2):
            _answered(llm, ASKED, expected)
        files.heal()
        _answered(llm, ASKED, expected)


def test_a_folder_removed_while_in_use_changes_no_answer(
    model: Path, expected: list[RequestOutput], tmp_path: Path
) -> None:
    data = tmp_path / "data"
    with _disk_server(data) as address, _engine(model, address, None) as llm:
        _answered(llm, ASKED, expected)
        _flushed(llm)
        shutil.rmtree(data)
        for _ in range(2):
            _answered(llm, ASKED, expected)
            settled(llm)
        wait_until(lambda: (data / _DATA_NAME).exists())
        wait_until(lambda: _is_hit_again(llm, expected))
        assert_nothing_held(llm)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_changes_no_answer(model: Path, expected: list[RequestOutput], tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "kvtier-test", str(mount)], capture_output=True)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with _disk_server(mount / "data") as address, _engine(model, address, None) as llm:
            for _ in range(3):
                _answered(llm, ASKED, expected)
                settled(llm)
            with contextlib.suppress(TierRefused):  # it says how many blocks found no room, if some did not
                _flushed(llm)
            assert_nothing_held(llm)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _altered(path: Path, chance: random.Random) -> None:
    """Every block of the file has another bit somewhere."""
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, BLOCK_BYTES):
            place = start + chance.randrange(BLOCK_BYTES)
            file.seek(place)
            byte = file.read(1)
            if byte:
                file.seek(place)
                file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))


@pytest.mark.parametrize("is_running", [True, False], ids=["while-running", "between-runs"])
def test_a_block_altered_on_disk_never_reaches_the_model(
    model: Path, expected: list[RequestOutput], tmp_path: Path, is_running: bool
) -> None:
    data = tmp_path / "server" / "data"
    data.parent.mkdir()
    options = ("--folder", str(data), "--disk", "32MiB", "--disk-only")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(cache_server(*options, memory="1MiB"))
        with _engine(model, server.unix, None) as llm:
            _answered(llm, ASKED, expected)
            _flushed(llm)
            assert _answered(llm, ASKED, expected).get("disk", 0) > 0
            ask(llm, OTHERS)  # out of the server's memory with the others
            _flushed(llm)
        if not is_running:
            server.stop()
        _altered(data / _DATA_NAME, random.Random(6))
        if not is_running:
            server = stack.enter_context(cache_server(*options, memory="1MiB"))
        with _engine(model, server.unix, None) as llm:
            found = _answered(llm, ASKED, expected)
            assert found.get("disk", 0) == 0
            client: Any = llm.engine.transfer.traffic.hierarchy.guards[-1].tier.client  # type: ignore[union-attr]
            stats = client.stats()
            assert any("corrupt" in name and count for name, count in _numbers(stats)), stats
            explained = llm.engine.explain("request-0")
            assert explained.reason.value == "lost or corrupt"
            _flushed(llm)
            wait_until(lambda: _is_hit_again(llm, expected))
            assert_nothing_held(llm)


def _numbers(document: object, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _numbers(value, f"{name}.{key}")
    elif isinstance(document, (int, float)):
        yield name, document
