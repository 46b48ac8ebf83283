"""Who a block belongs to: the digest over everything that changes its bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NAMESPACE_BYTES, NamespaceFields, namespace_differences
from kvtier.errors import ConfigError

LAYOUT_FIELDS: dict[str, object] = {
    "layers": 2,
    "kv_heads": 1,
    "head_dim": 80,
    "dtype": "float16",
    "block_tokens": 16,
}
PLAIN_DIGEST = "9042df21aada195a82b65ce99c7a94ce7d3af9429bbdf8050fa58eed448bdfb4"
FULL_DIGEST = "98741f6fec21f4ddd5f3c7abf8b12f81a92f223d85d8f0875a8a658478fb384e"
IN_ANOTHER_PROCESS = """
from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NamespaceFields
layout = KvLayout(layers=2, kv_heads=1, head_dim=80, dtype="float16", block_tokens=16)
config = {key: len(key) for key in {"theta", "hidden", "eps", "heads"}}
print(NamespaceFields(layout=layout, weights="w", model_config=config).digest().hex())
"""


def fields(**changes: object) -> NamespaceFields:
    shape = LAYOUT_FIELDS | {name: changes.pop(name) for name in list(changes) if name in LAYOUT_FIELDS}
    return NamespaceFields(layout=KvLayout(**shape), **({"weights": "w"} | changes))  # type: ignore[arg-type]


def full_fields() -> NamespaceFields:
    return fields(
        model_config={"rope": {"b": 1, "a": [1.5, None, True, "é"]}},
        quantization="awq",
        compute_dtype="bfloat16",
        first_layer=3,
        lora="l",
        salt="s",
    )


def test_the_digest_is_the_same_on_every_machine_and_version() -> None:
    assert fields().digest().hex() == PLAIN_DIGEST
    assert full_fields().digest().hex() == FULL_DIGEST
    assert len(fields().digest()) == NAMESPACE_BYTES


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"kv_heads": 2},
        {"head_dim": 64},
        {"dtype": "float32"},
        {"block_tokens": 32},
        {"weights": "w2"},
        {"model_config": {"rope_theta": 10_000}},
        {"quantization": "awq"},
        {"compute_dtype": "float32"},
        {"first_layer": 1},
        {"lora": "adapter"},
        {"salt": "tenant"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_field_makes_another_namespace(change: dict[str, object]) -> None:
    assert fields(**change).digest() != fields().digest()


def test_values_moved_between_fields_make_another_namespace() -> None:
    assert fields(lora="x").digest() != fields(salt="x").digest()


@pytest.mark.parametrize(
    "other",
    [{"rope": {"factor": 8.0}}, {"rope": {"factor": 4.0, "low": 1}}, {"Rope": {"factor": 4.0}}, {"rope": None}, {}],
)
def test_any_depth_of_the_models_config_counts(other: dict[str, object]) -> None:
    assert fields(model_config=other).digest() != fields(model_config={"rope": {"factor": 4.0}}).digest()


def test_the_order_of_the_models_config_does_not_count() -> None:
    forwards = {"a": 1, "b": {"c": 2, "d": 3}}
    backwards = {"b": {"d": 3, "c": 2}, "a": 1}

    assert fields(model_config=forwards).digest() == fields(model_config=backwards).digest()


def test_computing_in_the_blocks_own_dtype_is_what_no_dtype_says() -> None:
    assert fields(compute_dtype="float16").digest() == fields().digest()


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes", {1, 2}])
def test_a_config_that_is_not_plain_json_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="plain JSON"):
        fields(model_config={"key": value}).digest()


def test_another_process_with_another_hash_seed_finds_the_same_namespace() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "4711")
    }
    config = {key: len(key) for key in ("eps", "heads", "hidden", "theta")}

    assert digests == {fields(model_config=config).digest().hex()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": 3}, ["layers"]),
        ({"kv_heads": 2}, ["kv_heads"]),
        ({"head_dim": 64}, ["head_dim"]),
        ({"dtype": "float32"}, ["compute_dtype", "kv_dtype"]),
        ({"dtype": "float32", "compute_dtype": "float16"}, ["kv_dtype"]),
        ({"block_tokens": 32}, ["block_tokens"]),
        ({"weights": "w2"}, ["weights"]),
        ({"model_config": {"rope": {"theta": 5.0}}}, ["model_config.rope"]),
        ({"quantization": "awq"}, ["quantization"]),
        ({"first_layer": 1}, ["first_layer"]),
        ({"lora": "adapter"}, ["lora"]),
        ({"salt": "tenant"}, ["salt"]),
        ({}, []),
    ],
    ids=lambda value: " ".join(value) or "nothing",
)
def test_what_differs_is_named(change: dict[str, object], named: list[str]) -> None:
    assert namespace_differences(fields().document(), fields(**change).document()) == named
    assert namespace_differences(fields(**change).document(), fields().document()) == named


def test_what_differs_deep_in_the_models_config_is_named_with_dots() -> None:
    ours = fields(model_config={"rope": {"theta": 1e4, "kind": "yarn"}, "windows": (None, 8)})
    theirs = fields(model_config={"rope": {"theta": 1e6, "kind": "yarn"}, "windows": [None, 16], "eps": 1})

    assert namespace_differences(ours.document(), theirs.document()) == [
        "model_config.eps",
        "model_config.rope.theta",
        "model_config.windows",
    ]


def test_a_document_is_plain_json_and_tells_no_salt() -> None:
    document = fields(salt="a secret", model_config={"windows": (1, None)}).document()

    assert json.loads(json.dumps(document)) == document
    assert "a secret" not in json.dumps(document)
    assert document["salt"] != fields(salt="another").document()["salt"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
configs = st.dictionaries(st.text(max_size=3), plain, max_size=3)


@given(configs, configs)
@example({"a": 1}, {"a": True})
@example({"a": [1]}, {"a": [1.0]})
@example({"a": None}, {})
@example({"a": {}}, {"a": []})
def test_documents_differ_exactly_where_digests_do(one: dict[str, object], other: dict[str, object]) -> None:
    ours, theirs = fields(model_config=one), fields(model_config=other)

    is_same = ours.digest() == theirs.digest()
    assert (namespace_differences(ours.document(), theirs.document()) == []) == is_same
