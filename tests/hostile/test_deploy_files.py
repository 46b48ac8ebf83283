"""Deployment files of any content give a plan or errors in sentences, at once and never anything else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from kvtier.deploy.file.yaml_file import read_yaml
from kvtier.deploy.plan.deployment import load_plan
from kvtier.errors import ConfigError
from tests.support.fuzzing import SOAK_TIMES, any_value, as_json, seeds, spoiled_bytes, spoiled_value, told

_NUM_CASES = 3000
_NATIVE = {
    "models": [
        {
            "model": "tiny",
            "name": ["qwen", "q"],
            "engines": 2,
            "devices": ["cuda:0", "cuda:1"],
            "gpu_memory_utilization": 0.9,
            "swap_space": "20GiB",
            "default_options": {"max_tokens": 1024, "stop": ["a", "b"]},
            "max_model_len": 1000,
            "block_size": 16,
            "schedule": "async-2",
            "salt": "s",
        }
    ],
    "cache": {"memory": "1GiB", "disk": 100, "folder": "blocks", "metrics": "127.0.0.1:9400", "max_connections": 3},
    "http": {"host": "127.0.0.1", "openai": 8080, "ollama": False, "api_keys": [{"name": "alice", "key": "secret"}]},
}
_CHAT = {
    "chat": {"models": [{"model": "tiny", "engine_args": {"block_size": 16, "swap_space": 20}}]},
    "remote_kv_cache": [{"model": "tiny", "engine_args": {"block_size": 16, "memory_space": 20}}],
    "entrypoints": ["ollama_compatible", {"openai_compatible": {"port": 8000}}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    return tmp_path


def _text(rng: random.Random) -> bytes:
    base = rng.choice((_NATIVE, _CHAT))
    match rng.randrange(4):
        case 0:
            return spoiled_bytes(rng, yaml.safe_dump(base).encode())
        case 1:
            return as_json(spoiled_value(rng, base))
        case 2:
            return yaml.safe_dump(spoiled_value(rng, spoiled_value(rng, base)), allow_unicode=True).encode()
    return as_json(any_value(rng))


def _try(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    raw = _text(rng)
    path = folder / "deploy.yml"
    path.write_bytes(raw)
    with told(seed, raw):
        try:
            load_plan(path, Path("/run/kvtier"))
        except ConfigError as error:
            for line in str(error).split("\n"):
                assert line.isprintable(), f"a terminal would obey {line!r}"
                assert len(line) < 3000


@pytest.mark.scaled
def test_any_file_is_a_plan_or_sentences(folder: Path) -> None:
    for seed in seeds(_NUM_CASES):
        _try(folder, seed)


@pytest.mark.soak
def test_any_of_many_files_is_a_plan_or_sentences(folder: Path) -> None:
    for seed in range(_NUM_CASES, SOAK_TIMES * _NUM_CASES):
        _try(folder, seed)


def _bombs() -> dict[str, str]:
    merges = "".join(f"l{n}: &l{n} {{<<: [{', '.join([f'*l{n - 1}'] * 10)}]}}\n" for n in range(1, 30))
    lists = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]\n" for n in range(1, 30))
    return {
        "merge keys": f"l0: &l0 {{a: 1}}\n{merges}",
        "aliases": f"l0: &l0 [1]\n{lists}",
        "many aliases": "a: &a 1\nb: [" + "*a, " * 200_000 + "]\n",
        "many values": "a: [" + "1, " * 300_000 + "]\n",
        "many keys": "".join(f"k{n}: 1\n" for n in range(80_000)),
        "depth": "a: " + "[" * 500_000,
        "depth by lines": "".join(" " * n + "a:\n" for n in range(1000)),
        "sexagesimal": "models: 1" + ":59" * 300_000 + "\n",
        "digits": "models: " + "9" * 900_000 + "\n",
        "hexadecimal digits": "models: 0x" + "f" * 900_000 + "\n",
        "long text": "models: '" + "x" * 1_000_000 + "'\n",
        "long key": "models: [{model: tiny}]\n" + "x" * 1000 + ": 1\n",
        "question marks": "? " * 300_000,
    }


@pytest.mark.parametrize("name", list(_bombs()))
def test_a_file_that_grows_when_it_is_read_is_refused_in_one_short_sentence(folder: Path, name: str) -> None:
    path = folder / "deploy.yml"
    path.write_text(_bombs()[name])
    with pytest.raises(ConfigError) as caught:
        load_plan(path, Path("/run/kvtier"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("models: [{model: tiny, swap_space: 1:30}]", "1:30 is a number to the base of 60 in YAML: write '1:30'"),
        ("models: [{model: tiny, gpu_memory_utilization: 1:30.5}]", "1:30.5 is a number to the base of 60 in YAML"),
        ("models: [{model: tiny, engines: 1000000000}]", "engines must be from 1 to 1024, not 1000000000"),
        (f"models: [{{model: {'a' * 300}}}]", "model must be a folder or a name on the hub, with names of at most 255"),
        (f"models: [{{model: tiny, name: {'a' * 300}}}]", "name must have at most 255 characters, not 300"),
        (
            f"models: [{{model: tiny}}]\ncache: {{folder: {'a' * 300}, disk: 1}}",
            "cache.folder must be a path of at most 4095 bytes, 255 between two slashes",
        ),
        ('models: [{model: tiny, name: "a\\e[31m"}]', "name must have no control characters, as in a\\x1b[31m"),
        ('models: [{model: tiny, "a\\e[31m": 1}]', "models[0].a\\x1b[31m is unknown"),
        ('"a\\e[31m": 1\n"a\\e[31m": 2', "a\\x1b[31m is given twice"),
        ("models: !!int ''", "'' does not match its tag"),
        ("models: !!bool perhaps", "'perhaps' does not match its tag"),
    ],
)
def test_what_is_meant_to_mislead_is_one_sentence(folder: Path, text: str, sentence: str) -> None:
    path = folder / "deploy.yml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_plan(path, Path("/run/kvtier"))
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


def test_times_in_quotes_stay_text(folder: Path) -> None:
    path = folder / "deploy.yml"
    path.write_text("a: '1:30'\n")
    assert read_yaml(path).value == {"a": "1:30"}
