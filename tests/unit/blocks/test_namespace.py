"""Who a block belongs to: the digest over everything that changes its bytes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvtier.blocks.layout import KvLayout
from kvtier.blocks.namespace import NAMESPACE_BYTES, NamespaceFields
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
