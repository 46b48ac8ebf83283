"""The namespace of a vLLM engine's blocks: the same as in kvtier's own engine, where that runs the checkpoint.

It is made of the model's folder and vLLM's resolved settings, never of vLLM's own hashes, which depend on its version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import vllm
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVQuantMode
from vllm.v1.request import Request

from kvtier.blocks.full_identity import IdentityKind, identity_of_folder
from kvtier.blocks.layout import DTYPE_BYTES, KvLayout, OpaqueLayout
from kvtier.blocks.namespace import NamespaceFields
from kvtier.errors import ConfigError
from kvtier.models.config import read_config
from kvtier.models.progress import terminal_progress
from kvtier.plugins.vllm.attention_backends import LayerBackends
from kvtier.plugins.vllm.compat import HANDS_OVER_STATES
from kvtier.plugins.vllm.groups import Group, descriptions, groups_of, page_bytes_of
from kvtier.plugins.vllm.releases import release_of
from kvtier.transfer.block_groups import BlockGroups

BLOCK_TOKENS = 16

_ONLY_IN_VLLM = frozenset({"dual_chunk_attention_config", "alpha", "max_trained_positions"})
"""Fields that change K in vLLM but are unknown to kvtier's own engine."""

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")


@dataclass(frozen=True, slots=True)
class Identity:
    """The layout and namespace of blocks, and the groups and pages that hold them in the engine.

    `is_opaque`: a block is vLLM's page as it is, of all layers and of each of `num_parts` ranks.
    """

    layout: KvLayout
    fields: NamespaceFields
    groups: tuple[Group, ...]
    page_tokens: int
    num_ranks: int
    num_parts: int
    num_pages: int
    name: str
    is_opaque: bool

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group.layer_names)

    @property
    def block_groups(self) -> BlockGroups:
        return BlockGroups(tuple(group.reach for group in self.groups))

    @property
    def unit_tokens(self) -> int:
        """Loads end at multiples of this."""
        return max(self.block_groups.unit_tokens, self.layout.block_tokens)

    @property
    def description(self) -> str:
        """The format of blocks, and the engines that can share them."""
        if self.is_opaque:
            return f"pages as vLLM has them, for vLLM alone: {descriptions(self.groups)}"
        return f"blocks of kvtier's own format, for all engines: {descriptions(self.groups)}"

    def first_head(self, rank: int) -> int:
        """The first head of a tensor-parallel rank. With more ranks than heads, some ranks have the same."""
        return rank * self.layout.kv_heads // self.num_ranks

    def part(self, rank: int) -> int:
        """The part of an opaque block that a rank holds."""
        return rank * self.num_parts // self.num_ranks


def identity_of(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    salt: str,
    kind: IdentityKind = "sampled",
    *,
    backends: LayerBackends | None,
) -> Identity:
    """`backends` are needed unless `is_own_format`. Raises `ConfigError` with the reason why nothing can be kept."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size or parallel.decode_context_parallel_size > 1:
        raise ConfigError("pipeline and context parallelism are not supported")
    groups = groups_of(kv_cache_config)
    if isinstance(groups, str):
        raise ConfigError(groups)
    num_layers = sum(len(group.layer_names) for group in groups)
    is_opaque = not is_own_format(kv_cache_config)
    num_parts = 1
    if is_opaque:
        _check_opaque(vllm_config, groups)
        num_parts = 1 if all(group.is_latent for group in groups) else parallel.tensor_parallel_size
        layout: KvLayout = _opaque_layout(kv_cache_config, groups, num_parts)
    else:
        layout = _own_layout(vllm_config, kv_cache_config)
    fields = fields_of(vllm_config, layout, num_layers, salt, kind)
    if is_opaque:
        if backends is None:
            raise ConfigError("the attention backends of its layers are not known, or differ between ranks")
        pages = _page_format(vllm_config, kv_cache_config, groups, num_parts, layout, backends)
        fields = replace(fields, model_config={**fields.model_config, "vllm_pages": pages})
    return Identity(
        layout=layout,
        fields=fields,
        groups=groups,
        page_tokens=layout.block_tokens if is_opaque else groups[0].reach.block_tokens,
        num_ranks=parallel.tensor_parallel_size,
        num_parts=num_parts,
        num_pages=kv_cache_config.num_blocks,
        name=name_of(vllm_config),
        is_opaque=is_opaque,
    )


def fields_of(
    vllm_config: VllmConfig, layout: KvLayout, num_layers: int, salt: str, kind: IdentityKind
) -> NamespaceFields:
    """The namespace of blocks of `layout`; KV is in `num_layers` layers. Raises `ConfigError` as `identity_of`."""
    model_config = vllm_config.model_config
    folder = _folder(str(model_config.model), model_config.revision, vllm_config.load_config.download_dir)
    return NamespaceFields(
        layout=layout,
        weights=_weights(vllm_config, folder, kind),
        model_config=_model_identity(vllm_config, folder, num_layers),
        quantization=_quantization(vllm_config),
        compute_dtype=str(model_config.dtype).removeprefix("torch."),
        salt=salt,
    )


def name_of(vllm_config: VllmConfig) -> str:
    """The model's short name."""
    return str(vllm_config.model_config.model).rstrip("/").rsplit("/", 1)[-1]


def is_own_format(kv_cache_config: KVCacheConfig) -> bool:
    """Whether blocks have kvtier's own format: K and V of all heads of full attention, in a known order."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return False
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        return False
    if spec.head_size_v != spec.head_size or str(spec.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return False
    is_packed = spec.num_head_slots is not None or spec.state_content_bytes is not None or spec.tokens_per_state != 1
    if is_packed or spec.kv_quant_mode is not KVQuantMode.NONE:
        return False
    if current_platform.is_cpu() and not _is_order_known(spec.dtype):
        return False
    return spec.block_size % BLOCK_TOKENS == 0 or BLOCK_TOKENS % spec.block_size == 0


def _own_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> KvLayout:
    group = kv_cache_config.kv_cache_groups[0]
    spec = group.kv_cache_spec
    assert isinstance(spec, FullAttentionSpec)
    return KvLayout(
        layers=len(group.layer_names),
        kv_heads=max(vllm_config.model_config.get_total_num_kv_heads(), spec.num_kv_heads),
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch."),
        block_tokens=BLOCK_TOKENS,
    )


def _check_opaque(vllm_config: VllmConfig, groups: Sequence[Group]) -> None:
    """Raises `ConfigError` where vLLM would not reuse pages, or reuses them by unknown rules."""
    cache_config = vllm_config.cache_config
    if getattr(cache_config, "calculate_kv_scales", False):
        raise ConfigError("its KV scales are computed at run time (calculate_kv_scales) and differ between engines")
    if not cache_config.enable_prefix_caching:
        raise ConfigError("vLLM's own prefix cache is off for this model")
    if BlockGroups(tuple(group.reach for group in groups)).is_one_full:
        return
    if vllm_config.speculative_config is not None:
        raise ConfigError("speculative decoding is not supported for models with sliding windows or states")
    if vllm_config.parallel_config.tensor_parallel_size > 1:
        raise ConfigError("several ranks are not supported for models with sliding windows or states")
    if not HANDS_OVER_STATES:
        raise ConfigError("this release of vLLM does not report which pages windows and states are in")


def _opaque_layout(kv_cache_config: KVCacheConfig, groups: Sequence[Group], num_parts: int) -> OpaqueLayout:
    page_bytes = page_bytes_of(kv_cache_config)
    if page_bytes is None:
        raise ConfigError("this release of vLLM does not report where its pages lie")
    block_tokens = BlockGroups(tuple(group.reach for group in groups)).block_tokens
    return OpaqueLayout(nbytes=page_bytes * num_parts, block_tokens=block_tokens)


def _page_format(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: Sequence[Group],
    num_parts: int,
    layout: KvLayout,
    backends: LayerBackends,
) -> Mapping[str, object]:
    """Everything beside the model that a page's bytes depend on: engines share pages only if all of it is equal."""
    return {
        "release": list(release_of(vllm.__version__)),
        "device": page_device(),
        "capability": str(current_platform.get_device_capability()),
        "backends": sorted(set(backends.names)),
        "backends_of_layers": hashlib.sha256(json.dumps(backends.names).encode()).hexdigest(),
        "layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
        "dtype": str(vllm_config.cache_config.cache_dtype),
        "parts": num_parts,
        "nbytes": layout.block_bytes,
        "groups": [
            {
                "kind": group.description,
                "block_tokens": group.reach.block_tokens,
                "layers": hashlib.sha256(json.dumps(group.layer_names).encode()).hexdigest(),
                "format": group.format,
            }
            for group in groups
        ],
    }


def page_device() -> list[str]:
    """The device: kernels choose the order inside a page by it."""
    device = [str(current_platform.device_type), str(current_platform.get_device_name())]
    if current_platform.is_cpu():
        has_tiles = torch.cpu._is_amx_tile_supported()
        device += [
            str(current_platform.get_cpu_architecture()),
            torch.backends.cpu.get_cpu_capability(),
            str(has_tiles),
        ]
    return device


class RequestSalts:
    """What identifies a request's blocks beside its tokens, in the form of kvtier's own server. Thread-safe.

    An adapter's files are read when vLLM loads them: once, unless a request asks for a reload.
    """

    def __init__(self, kind: IdentityKind = "sampled") -> None:
        self._kind = kind
        self._adapters: dict[tuple[int, str], str] = {}

    def of(self, request: Request) -> str:
        """The request's salt. Raises `ConfigError` or `OSError` for an adapter that cannot be identified."""
        others: list[str] = []
        if request.lora_request is not None:
            others.append(f"lora {self._adapter(request.lora_request)}")
        others += [f"{feature.identifier} at {feature.mm_position.offset}" for feature in request.mm_features]
        cache_salt = request.cache_salt or ""
        if not others:
            return f"0:{cache_salt}" if cache_salt else ""
        return hashlib.sha256(json.dumps([cache_salt, *others]).encode()).hexdigest()

    def _adapter(self, lora: LoRARequest) -> str:
        key = (lora.lora_int_id, lora.lora_path)
        known = None if lora.load_inplace else self._adapters.get(key)
        if known is None:
            folder = Path(lora.lora_path)
            config = hashlib.sha256((folder / "adapter_config.json").read_bytes()).hexdigest()
            known = f"{identity_of_folder(folder, self._kind)} {config}"
            self._adapters[key] = known
        return known


def _is_order_known(dtype: torch.dtype) -> bool:
    """vLLM lays out a page's K for the processor's instructions; for matrix tiles (AMX) it is packed again."""
    is_tiled = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return not is_tiled and current_platform.get_cpu_architecture() in (CpuArchEnum.X86, CpuArchEnum.ARM)


def _folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception as error:  # any error of the hub's client for a missing model
        raise ConfigError(f"cannot find the folder of the model {model}: {error}") from error


def _weights(vllm_config: VllmConfig, folder: Path, kind: IdentityKind) -> str:
    if vllm_config.load_config.load_format == "dummy":
        return f"vllm dummy weights with seed {vllm_config.model_config.seed}"
    return identity_of_folder(folder, kind, terminal_progress)


def _quantization(vllm_config: VllmConfig) -> str:
    model_config = vllm_config.model_config
    if not model_config.quantization:
        return ""
    details = model_config.quantization_config
    return f"vllm {model_config.quantization}" + ("" if details is None else f" {_plain(details)}")


def _model_identity(vllm_config: VllmConfig, folder: Path, num_layers: int) -> Mapping[str, object]:
    """As in kvtier's own engine for families it knows; else the whole config, and settings that change vLLM's KV."""
    model_config = vllm_config.model_config
    document: dict[str, Any] = model_config.hf_config.to_dict()
    draft = vllm_config.speculative_config
    has_draft = draft is not None and num_layers != model_config.hf_text_config.num_hidden_layers
    is_plain = not model_config.hf_overrides and model_config.hf_config_path in (None, model_config.model)
    if is_plain and not has_draft and not _has_more(document, _ONLY_IN_VLLM):
        try:
            return read_config(folder).kv_identity()
        except ConfigError:
            pass  # a family that only vLLM knows
    plain = {name: value for name, value in document.items() if name not in _NOT_THE_MODEL}
    if has_draft:  # some layers belong to the draft model
        plain["draft"] = [draft.method, draft.model]
    if "longrope" in _plain(document):  # vLLM picks its factors by the longest possible prompt
        plain["max_model_len"] = model_config.max_model_len
    return {"vllm": json.loads(_plain(plain))}


def _has_more(document: object, names: frozenset[str]) -> bool:
    """Whether any of these names has a value somewhere in a config, at any depth."""
    if isinstance(document, Mapping):
        return any((name in names and value) or _has_more(value, names) for name, value in document.items())
    return False


def _plain(document: object) -> str:
    return json.dumps(document, default=str, sort_keys=True)
