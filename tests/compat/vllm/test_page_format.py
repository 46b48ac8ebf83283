"""The namespace of opaque pages, from vLLM's specs alone: KV of another dtype, scale or layer is other blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvtier.errors import ConfigError
from kvtier.plugins.vllm.attention_backends import LayerBackends
from kvtier.plugins.vllm.compat import HANDS_OVER_STATES
from kvtier.plugins.vllm.groups import groups_of
from kvtier.plugins.vllm.identity import Identity, identity_of
from kvtier.transfer.reach import AttentionKind
from tests.compat.vllm.engines import model_folder

pytestmark = pytest.mark.skipif(not HANDS_OVER_STATES, reason="this release of vLLM does not report its pages")

_LAYERS = ["layer.0", "layer.1"]
_PAGES = 8
_BACKENDS = LayerBackends(("vllm.Flash",) * 2)
_FP8 = FullAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
)
_MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.float16)


def _kv(spec: Any) -> KVCacheConfig:
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=2 * _PAGES * page, layers=_LAYERS, layer_stride=_PAGES * page, block_stride=page)
    return KVCacheConfig(_PAGES, [tensor], [KVCacheGroupSpec(_LAYERS, spec)])


def _engine(*, ranks: int = 1, **cache: object) -> Any:
    plain = {"enable_prefix_caching": True, "cache_dtype": "fp8_e4m3"}
    hf_config = SimpleNamespace(to_dict=lambda: {"model_type": "tiny"}, num_hidden_layers=2)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=ranks, tensor_parallel_size=ranks, decode_context_parallel_size=1),
        cache_config=SimpleNamespace(**{**plain, **cache}),
        speculative_config=None,
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        model_config=SimpleNamespace(
            model=str(model_folder()),
            revision=None,
            seed=0,
            dtype=torch.float16,
            quantization=None,
            hf_config=hf_config,
            hf_text_config=hf_config,
            hf_overrides={},
            hf_config_path=None,
        ),
    )


def _identity(spec: Any, backends: LayerBackends | None = _BACKENDS, **engine: Any) -> Identity:
    return identity_of(_engine(**engine), _kv(spec), "", backends=backends)


def test_fp8_pages_are_opaque_and_a_page_has_the_bytes_of_all_layers() -> None:
    identity = _identity(_FP8)

    assert identity.is_opaque
    assert identity.layout.block_bytes == 2 * _FP8.page_size_bytes
    assert identity.page_tokens == 32


@pytest.mark.parametrize(
    "other",
    [
        {"spec": replace(_FP8, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)},
        {"spec": replace(_FP8, dtype=torch.int8)},
        {"cache_dtype": "fp8_e5m2"},
        {"backends": LayerBackends(("vllm.Flash", "vllm.Triton"))},
        {"backends": LayerBackends(("vllm.Triton",) * 2)},
        {"ranks": 2},
    ],
)
def test_pages_of_another_dtype_scale_backend_or_number_of_ranks_are_in_another_namespace(
    other: dict[str, Any],
) -> None:
    assert _identity(**{"spec": _FP8, **other}).fields.digest() != _identity(_FP8).fields.digest()
    assert _identity(_FP8).fields.digest() == _identity(_FP8).fields.digest()


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"calculate_kv_scales": True}, "its KV scales are computed at run time"),
        ({"enable_prefix_caching": False}, "vLLM's own prefix cache is off"),
        ({"backends": None}, "attention backends of its layers are not known"),
    ],
)
def test_pages_that_others_could_not_read_or_vllm_not_reuse_are_not_kept(other: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _identity(_FP8, **other)


def test_windows_in_several_ranks_are_not_kept() -> None:
    window = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=64)

    assert _identity(window).is_opaque
    with pytest.raises(ConfigError, match="several ranks are not supported"):
        _identity(window, ranks=2)


def test_latents_are_one_group_of_which_every_rank_has_all() -> None:
    (group,) = groups_of(_kv(_MLA))
    alone, shared = _identity(_MLA), _identity(_MLA, ranks=4)

    assert group.is_latent
    assert group.reach.attention is AttentionKind.FULL
    assert (alone.num_parts, shared.num_parts) == (1, 1)
    assert [shared.part(rank) for rank in range(4)] == [0] * 4
    assert alone.layout == shared.layout
    assert alone.fields.digest() == shared.fields.digest()


def test_heads_of_opaque_pages_are_divided_among_ranks() -> None:
    identity = _identity(_FP8, ranks=2)

    assert identity.layout.block_bytes == 2 * _identity(_FP8).layout.block_bytes
    assert [identity.part(rank) for rank in range(2)] == [0, 1]
