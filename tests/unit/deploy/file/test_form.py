"""What does not fit a deployment file: the line, the field, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from kvtier.deploy.file.chat_form import ChatDeployment
from kvtier.deploy.file.form import read_form, type_in_words
from kvtier.deploy.file.native import Deployment
from kvtier.deploy.file.yaml_file import Location, dotted, read_yaml
from kvtier.errors import ConfigError

Refuse = Callable[[str], list[str]]

MODELS = "models:\n  - model: owner/model\n"


def test_an_unknown_field_is_told_with_its_line_a_near_one_and_what_is_allowed(refuse: Refuse) -> None:
    (sentence,) = refuse(MODELS + "    swap_spac: 20GiB\n")

    assert sentence.startswith("deploy.yml:3: models[0].swap_spac is unknown; did you mean swap_space? allowed: name, ")
    assert sentence.endswith(", model, cache")


def test_everything_that_does_not_fit_is_told_at_once_in_the_order_of_lines(refuse: Refuse) -> None:
    sentences = refuse(MODELS + "    max_model_len: many\n  - device: cpu\ncach: {}\nhttp:\n  prot: 1\n  host: 3\n")

    assert [sentence.split(" is unknown;")[0] for sentence in sentences] == [
        "deploy.yml:3: models[0].max_model_len must be a whole number, not 'many'",
        "deploy.yml:4: models[1] lacks model",
        "deploy.yml:5: cach",
        "deploy.yml:7: http.prot",
        "deploy.yml:8: http.host must be text, not 3",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("    max_num_requests: 1.5\n", "3: models[0].max_num_requests must be a whole number, not 1.5"),
        ("    max_num_requests: true\n", "3: models[0].max_num_requests must be a whole number, not true"),
        ("    max_num_requests:\n", "3: models[0].max_num_requests must be a whole number, not empty"),
        (
            "    max_model_len: 1e6\n",
            "3: models[0].max_model_len must be a whole number, not '1e6', which is text in YAML: write all digits",
        ),
        (
            "http: {drain_s: 1e18}\n",
            "3: http.drain_s must be a number, not '1e18', which is text in YAML: write 1.0e+18",
        ),
        ("http: {drain_s: 2.5E-3x}\n", "3: http.drain_s must be a number, not '2.5E-3x'"),
        (
            "http: {max_body: 2.5e1}\n",
            "3: http.max_body must be a size such as 20GiB, or a plain number, which is GiB, not '2.5e1', "
            "which is text in YAML: write 2.5e+1",
        ),
        ("    cuda_graphs: 1\n", "3: models[0].cuda_graphs must be true or false, not 1"),
        ("    gpu_memory_utilization: high\n", "3: models[0].gpu_memory_utilization must be a number, not 'high'"),
        ("http: {drain_s: .inf}\n", "3: http.drain_s must be a number, not inf"),
        (f"http: {{drain_s: 1{'0' * 400}}}\n", "3: http.drain_s must be a number, not 1000"),
        (f"    swap_space: 1{'0' * 400}\n", "3: models[0].swap_space must be a size such as 20GiB, or a plain "),
        ("    name: [a, 7]\n", "3: models[0].name[1] must be text, not 7"),
        ("    name: {a: b}\n", "3: models[0].name must be text or a list, each text, not a mapping"),
        ("    dtype: int4\n", "3: models[0].dtype must be one of auto, bfloat16, float16, float32, not 'int4'"),
        ("    quantization: int8\n", "3: models[0].quantization must be fp8, not 'int8'"),
        ("    default_options: [1]\n", "3: models[0].default_options must be a mapping, not a list"),
        ("    cache_dir: ''\n", "3: models[0].cache_dir must be a path, not ''"),
        (
            "    swap_space: '20'\n",
            "3: models[0].swap_space must be a size such as 20GiB, or a plain number, which is GiB, not '20'",
        ),
        ("cache:\n", "3: cache must be a mapping or a list, each a mapping, not empty"),
        ("cache: [7]\n", "3: cache[0] must be a mapping, not 7"),
        ("cache:\n  memory: 1GiB\n  taste: 3\n", "5: cache.taste is unknown; allowed: socket, "),
        ("cache:\n  - memory: 1GiB\n  - taste: 3\n", "5: cache[1].taste is unknown; allowed: socket, "),
        ("http:\n  api_keys:\n    - key: x\n", "5: http.api_keys[0] lacks name"),
        ("    default_options: {max_token: 3}\n", "3: models[0].default_options.max_token is unknown; did you mean m"),
        (
            "    default_options:\n      stop: 3\n",
            "4: models[0].default_options.stop must be text or a list, each text",
        ),
        ("    default_options:\n      top_p: 7\n", "4: top_p must be more than 0 and at most 1, not 7"),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_in_words(refuse: Refuse, text: str, sentence: str) -> None:
    sentences = refuse(MODELS + text)

    assert len(sentences) == 1
    assert sentences[0].startswith(f"deploy.yml:{sentence}")


def test_a_secret_of_the_wrong_kind_is_not_repeated(refuse: Refuse) -> None:
    sentences = refuse(MODELS + "http:\n  api_keys:\n    - {name: a, key: 271828}\n")

    assert sentences == ["deploy.yml:5: http.api_keys[0].key must be text"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("    engines: 0\n", "3: engines must be from 1 to 1024, not 0"),
        ("    salt: x\n    device: tpu\n", "4: device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        ("    devices: [cuda:0, moon]\n", "3: devices must be auto, cpu, cuda or cuda:N, not 'moon'"),
        ("    engines: 3\n    devices: [cuda:0, cpu]\n", "4: devices must be one per engine: there are 2 for 3"),
        ("    device: cpu\n    devices: [cpu]\n", "4: devices takes the place of device: give one of them"),
        ("    name: ['']\n", "3: name must not be empty"),
        ("    salt: x\n    schedule: later\n", "4: schedule must be auto, sync or async-N with N from 1 to 99"),
        ("    block_size: 0\n", "3: block_size must be a positive whole number, not 0"),
        ("    gpu_memory_utilization: 2\n", "3: gpu_memory_utilization must be more than 0 and at most 1, not 2.0"),
        ("    cache_server: http://x\n", "3: cache_server: 'http://x' is not an address: write unix:/path"),
        ("cache:\n  folder: x\n", "4: folder needs disk, the most space it may take, as in disk: 100GiB"),
        ("cache:\n  disk: 3\n", "4: disk needs a folder to keep blocks in"),
        ("cache:\n  disk_only: true\n", "4: disk_only is about the disk: give a folder and disk too"),
        ("cache:\n  tcp: a:1\n", "4: tcp needs a token_file, or tenants, also on loopback"),
        ("cache:\n  metrics: 9400x\n", "4: metrics: '9400x' is not host:port"),
        ("cache:\n  memory: 1KiB\n", "4: memory must be at least 4KiB, not 1KiB"),
        ("cache:\n  memory: 8000TiB\n", "4: memory of 8000TiB is more than the"),
        ("cache:\n  max_connections: 0\n", "4: max_connections must be positive, not 0"),
        ("cache:\n  name: ''\n", "4: name must not be empty"),
        ("http:\n  openai: 70000\n", "4: openai must be a port from 0 to 65535, not 70000"),
        ("http:\n  host: x\n  openai: off\n  ollama:\n", "5: neither API is served: give openai or ollama a port"),
        ("http:\n  ollama: nowhere\n", "4: ollama: 'nowhere' is not host:port"),
        ("http:\n  host: ''\n", "4: host must be an address or a name, and 0.0.0.0 for all, not ''"),
        ("http:\n  host: '*'\n", "4: host must be an address or a name, and 0.0.0.0 for all, not '*'"),
        ("http:\n  openai: '*:8080'\n", "4: openai: host must be an address or a name, and 0.0.0.0 for all, not '*'"),
        (
            "cache:\n  metrics: '*:9400'\n",
            "4: metrics: host must be an address or a name, and 0.0.0.0 for all, not '*'",
        ),
        ("cache:\n  folder: kv\n  disk: 1KiB\n", "5: disk must be at least "),
        ("    salt: a\n    max_num_requests: 1000000\n", "4: max_num_requests must be "),
        ("    salt: a\n    max_num_batched_tokens: 10000000\n", "4: max_num_batched_tokens must be "),
        ("    salt: a\n    max_model_len: 1000000000\n", "4: max_model_len must be "),
        ("http:\n  max_requests: 0\n", "4: max_requests must be positive, not 0"),
        ("http:\n  max_body: 0\n", "4: max_body_bytes must be positive, not 0"),
        ("http:\n  api_keys:\n    - name: a\n", "5: the API key 'a' needs either key or key_file"),
        ("http:\n  api_keys: [{name: a, key: é}]\n", "4: the API key of a must be printable ASCII, and not empty"),
    ],
)
def test_a_value_that_cannot_work_is_told_with_its_line(refuse: Refuse, text: str, sentence: str) -> None:
    sentences = refuse(MODELS + text)

    assert len(sentences) == 1
    assert sentences[0].startswith(f"deploy.yml:{sentence}")


def test_no_models_are_nothing_to_serve(refuse: Refuse) -> None:
    assert refuse("models: []\n") == ["deploy.yml:1: models is empty: there is nothing to serve"]
    assert refuse("http: {}\n") == ["deploy.yml:1: the file lacks models"]


NATIVE: dict[str, Any] = {
    "models": [{"model": "owner/a", "default_options": {}}, {"model": "owner/b", "swap_space": 3}],
    "cache": [{"name": "a", "memory": "1GiB"}, {"name": "b"}],
    "http": {"host": "localhost", "api_keys": [{"name": "alice", "key": "secret"}]},
}
CHAT: dict[str, Any] = {
    "chat": {"models": [{"model": "owner/a", "engine_args": {"swap_space": 20}}]},
    "remote_kv_cache": [{"model": "owner/a", "engine_args": {"memory_space": 20}}],
    "entrypoints": [{"openai_compatible": {"port": 1}}],
}


def places_of_mappings(value: object, location: Location = ()) -> list[Location]:
    """Where a Struct is read; sampling parameters are read later, entrypoints by their names."""
    if location and location[-1] == "default_options":
        return []
    if isinstance(value, dict):
        own = [] if location[:1] == ("entrypoints",) and len(location) == 2 else [location]
        return own + [place for name, one in value.items() for place in places_of_mappings(one, (*location, name))]
    if isinstance(value, list):
        return [place for number, one in enumerate(value) for place in places_of_mappings(one, (*location, number))]
    return []


@given(data=st.data(), form=st.sampled_from([(NATIVE, Deployment), (CHAT, ChatDeployment)]))
def test_any_unknown_key_anywhere_is_reported_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, form: tuple[dict[str, Any], type[msgspec.Struct]]
) -> None:
    value, kind = msgspec.json.decode(msgspec.json.encode(form[0])), form[1]
    place = data.draw(st.sampled_from(places_of_mappings(value)))
    key = data.draw(st.from_regex(r"z[a-z_]{1,12}", fullmatch=True))
    target = value
    for step in place:
        target = target[step]
    target[key] = data.draw(st.sampled_from([None, 3, "text", [1], {"a": 1}]))
    path = tmp_path_factory.getbasetemp() / "anywhere.yml"
    path.write_text(yaml.safe_dump(value, sort_keys=data.draw(st.booleans())))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if f"{key}:" in text)

    with pytest.raises(ConfigError) as caught:
        read_form(read_yaml(path), (), kind)

    assert str(caught.value).startswith(f"{path}:{line}: {dotted((*place, key))} is unknown; ")
    assert "\n" not in str(caught.value)


def test_paths_are_relative_to_the_file_and_home_is_known(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    folder = tmp_path / "inner"
    folder.mkdir()
    (folder / "deploy.yml").write_text(
        "models: [{model: a/b, cache_dir: ~/hub}]\ncache: {folder: kv, disk: 1, socket: /run/a.sock}\n"
    )

    read = read_form(read_yaml(Path("inner/deploy.yml")), (), Deployment)

    assert read.models[0].cache_dir == Path("/home/alice/hub")
    assert read.caches[0].folder == folder / "kv"
    assert read.caches[0].socket == Path("/run/a.sock")


def test_every_field_of_both_forms_has_a_type_in_words() -> None:
    def fields(kind: inspect.Type) -> list[inspect.Field]:
        match kind:
            case inspect.StructType(fields=own):
                return [*own, *(inner for field in own for inner in fields(field.type))]
            case inspect.VarTupleType(item_type=inner):
                return fields(inner)
            case inspect.UnionType(types=types):
                return [field for one in types for field in fields(one)]
        return []

    for form in (Deployment, ChatDeployment):
        for field in fields(inspect.type_info(form)):
            assert type_in_words(field.type) != "any value", field.name
