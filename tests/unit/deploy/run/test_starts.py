"""Which engines may start beside which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier.deploy.plan.parts import EnginePart, VllmPart
from kvtier.deploy.run import starts
from kvtier.deploy.run.starts import FreeResources, StartNeeds, may_start, needs_of, room_here
from kvtier.engine.config import EngineConfig

GIB = 1 << 30
ROOM = FreeResources(num_cores=4, available_bytes=100 * GIB)
GPU = frozenset({"cuda:0"})
BOTH_GPUS = frozenset({"cuda:0", "cuda:1"})


def needs_of_engine(**settings: Any) -> StartNeeds:
    return needs_of(EnginePart(name="e", served_as="m", engine=EngineConfig(**settings), socket=""))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With weights of 3 KiB in two files."""
    (tmp_path / "a.safetensors").write_bytes(bytes(1024))
    (tmp_path / "b.safetensors").write_bytes(bytes(2048))
    return tmp_path


@pytest.mark.parametrize(
    ("one", "other", "may"),
    [
        (StartNeeds(), StartNeeds(), True),
        (StartNeeds(gpus=GPU, measures=True), StartNeeds(gpus=GPU, measures=True), False),
        (StartNeeds(gpus=GPU, measures=True), StartNeeds(gpus=GPU), False),
        (StartNeeds(gpus=GPU), StartNeeds(gpus=GPU), True),
        (StartNeeds(gpus=GPU, measures=True), StartNeeds(gpus=frozenset({"cuda:1"}), measures=True), True),
        (StartNeeds(gpus=GPU, measures=True), StartNeeds(gpus=BOTH_GPUS, measures=True), False),
        (StartNeeds(own_bytes=51 * GIB), StartNeeds(own_bytes=50 * GIB), False),
        (StartNeeds(own_bytes=50 * GIB), StartNeeds(own_bytes=50 * GIB), True),
        (
            StartNeeds(gpus=GPU, folder="a", weights_bytes=60 * GIB),
            StartNeeds(gpus=GPU, folder="a", weights_bytes=60 * GIB),
            True,
        ),
        (
            StartNeeds(gpus=GPU, folder="a", weights_bytes=60 * GIB),
            StartNeeds(gpus=GPU, folder="b", weights_bytes=60 * GIB),
            False,
        ),
    ],
)
def test_two_may_start_together_or_not_whichever_is_first(one: StartNeeds, other: StartNeeds, may: bool) -> None:
    assert may_start(one, [other], ROOM) is may
    assert may_start(other, [one], ROOM) is may


def test_one_alone_always_may() -> None:
    assert may_start(StartNeeds(own_bytes=1000 * GIB), [], FreeResources(num_cores=1, available_bytes=0))


def test_no_more_start_at_once_than_there_are_cores() -> None:
    assert may_start(StartNeeds(), [StartNeeds()] * 3, ROOM)
    assert not may_start(StartNeeds(), [StartNeeds()] * 4, ROOM)


def test_an_engine_on_the_cpu_keeps_its_weights_its_kv_and_its_swap(folder: Path) -> None:
    needs = needs_of_engine(model=str(folder), device="cpu", kv_cache_space=5000, swap_space=700)

    assert needs == StartNeeds(own_bytes=3072 + 5000 + 700)
    assert needs_of_engine(model=str(folder), device="cpu", load_format="dummy").own_bytes == GIB


def test_an_engine_on_a_gpu_measures_unless_its_kv_has_a_size(folder: Path) -> None:
    measured = needs_of_engine(model=str(folder), device="cuda", swap_space=700)
    fixed = needs_of_engine(model=str(folder), device="cuda:1", kv_cache_space=5000)

    assert measured == StartNeeds(gpus=GPU, measures=True, own_bytes=700, folder=str(folder), weights_bytes=3072)
    assert (fixed.gpus, fixed.measures) == (frozenset({"cuda:1"}), False)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_is_the_first_gpu_where_there_may_be_one(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.setattr(starts, "_GPU_DRIVERS", ("/dev/null" if has_gpu else "/dev/no-such-driver",))

    assert needs_of_engine(model="owner/name").gpus == (GPU if has_gpu else frozenset())


def test_an_engine_of_vllm_measures_all_of_its_gpus() -> None:
    part = VllmPart(
        name="v", served_as="m", model="owner/name", python="python", arguments=(), device="cuda:0,1", socket=""
    )

    assert needs_of(part) == StartNeeds(gpus=BOTH_GPUS, measures=True, folder="owner/name")


def test_this_machine_has_a_core_and_memory() -> None:
    room = room_here()

    assert room.num_cores >= 1
    assert room.available_bytes > 0
