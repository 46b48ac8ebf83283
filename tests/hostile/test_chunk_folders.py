"""Damaged chunk folders: never a wrong byte, no error is raised, and missing chunks are stored again."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.support.fuzzing import SOAK_TIMES, seeds, spoiled_bytes, told
from tests.support.vineyard_files import CHUNK, TEMP, chunk_paths, found, open_files, store

_NUM_CASES = 200
_SEQUENCES = [[first, *range(1, 6 * CHUNK)] for first in range(4)]


def _damage_file(rng: random.Random, path: Path, others: list[Path]) -> None:
    match rng.randrange(9):
        case 0:
            path.unlink()
        case 1:
            os.truncate(path, rng.randrange(path.stat().st_size + 10_000))
        case 2:
            path.unlink()
            path.mkdir()
        case 3:
            path.unlink()
            path.symlink_to(rng.choice((Path("/dev/zero"), Path("/nowhere"), path, rng.choice(others))))
        case 4:
            path.unlink()
            os.mkfifo(path)
        case 5:
            path.write_bytes(rng.choice(others).read_bytes() if rng.choice(others).is_file() else b"")
        case 6:
            path.rename(path.with_name(f"{rng.randbytes(32).hex()}-{rng.randrange(10**9)}"))
        case 7:
            path.chmod(rng.choice((0, 0o666, 0o4755)))
        case _:
            path.write_bytes(spoiled_bytes(rng, path.read_bytes()))


def _damage_folder(rng: random.Random, root: Path) -> None:
    (root / TEMP).mkdir(exist_ok=True)
    match rng.randrange(5):
        case 0:
            (root / TEMP / f"{'x' * rng.randrange(1, 200)}.room").write_bytes(b"")
        case 1:
            name = f"a.1.2.b-8192-{10 ** rng.randrange(40)}.room"
            (root / TEMP / name).write_bytes(b"")
            os.truncate(root / TEMP / name, rng.choice((0, 1 << 40)))
        case 2:
            shutil.rmtree(root / TEMP, ignore_errors=True)
        case 3:
            (root / f"{rng.randrange(256):02x}").mkdir(exist_ok=True)
            (root / f"{rng.randrange(256):02x}").mkdir(exist_ok=True)
        case _:
            (root / "zz").write_bytes(b"no chunk")


def _try(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    shutil.rmtree(folder, ignore_errors=True)
    capacity = rng.choice((1 << 20, 20 * CHUNK))
    with told(seed, capacity):
        with contextlib.closing(open_files(folder)) as cache:
            for tokens in _SEQUENCES:
                store(cache, tokens)
        for path in (paths := chunk_paths(folder)):
            if rng.random() < 0.3:
                _damage_file(rng, path, [one for one in paths if one.is_file()] or [path])
        for _ in range(rng.randrange(3)):
            _damage_folder(rng, folder)
        with contextlib.closing(open_files(folder, capacity=capacity)) as cache:
            rng.shuffle(_SEQUENCES)
            for tokens in _SEQUENCES:
                found(cache, tokens)  # fails on a wrong byte
            for tokens in _SEQUENCES:
                for _ in tokens:  # each look finds one that seemed whole and is not
                    stored = store(cache, tokens)
                    if found(cache, tokens) >= stored:
                        break
                else:
                    pytest.fail("what was stored is not found")


@pytest.mark.scaled
def test_any_damage_is_a_miss(tmp_path: Path) -> None:
    for seed in seeds(_NUM_CASES):
        _try(tmp_path / "root", seed)


@pytest.mark.soak
def test_any_of_much_damage_is_a_miss(tmp_path: Path) -> None:
    for seed in range(_NUM_CASES, SOAK_TIMES * _NUM_CASES):
        _try(tmp_path / "root", seed)
