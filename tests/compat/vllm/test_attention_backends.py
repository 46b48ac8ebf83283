"""The attention backends of an engine's layers: known to both of its sides, or no opaque page is shared."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvtier.errors import ConfigError
from kvtier.plugins.vllm import page_identity
from kvtier.plugins.vllm.attention_backends import LayerBackends, backends_of, common_backends
from tests.compat.vllm.engines import model_folder

_SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
_ONE = LayerBackends(("vllm.one",))
_OTHER = LayerBackends(("vllm.other",))


class _OfAnotherConnector(KVConnectorHandshakeMetadata):
    pass


def _config(backend: str | None = None) -> Any:
    """An engine whose layers are in other processes."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        attention_config=SimpleNamespace(backend=backend, backend_per_kind={}),
        cache_config=SimpleNamespace(kv_cache_layout=None),
        parallel_config=SimpleNamespace(),
        load_config=SimpleNamespace(load_format="dummy", download_dir=None),
        speculative_config=None,
        model_config=SimpleNamespace(
            model=str(model_folder()),
            revision=None,
            seed=0,
            dtype=torch.float32,
            quantization=None,
            hf_config=SimpleNamespace(to_dict=dict),
            hf_overrides=None,
            hf_config_path=None,
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )


_KV: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=_SPEC, layer_names=["a", "b"])])


@pytest.mark.parametrize(
    ("reported", "common"),
    [([_ONE], _ONE), ([_ONE, LayerBackends(("vllm.one",))], _ONE), ([_ONE, _OTHER], None), ([], None)],
)
def test_all_ranks_have_the_same_backends_or_none_are_known(
    reported: list[KVConnectorHandshakeMetadata], common: LayerBackends | None
) -> None:
    assert common_backends(reported) == common
    assert common_backends([*reported, _OfAnotherConnector()]) is None
    assert common_backends(pickle.loads(pickle.dumps(reported))) == common


def test_the_backends_of_layers_in_other_processes_are_not_known() -> None:
    assert backends_of(_config(), _KV) is None


def test_a_tier_keeps_nothing_where_workers_elsewhere_choose_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention_of(backend: str | None) -> object:
        identity = page_identity.page_identity(_config(backend), _KV, 4096, 1, "", "sampled")
        return identity.fields.model_config["vllm_pages"]["attention"]

    assert attention_of(None) != attention_of("FLASHMLA")

    monkeypatch.setattr(page_identity, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert attention_of("FLASH_ATTN") != attention_of("FLASHMLA")
    with pytest.raises(ConfigError, match="set --attention-backend"):
        attention_of(None)
