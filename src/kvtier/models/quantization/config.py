"""How a checkpoint's weights were quantised, read from `quantization_config` of its config.json."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import ConfigError
from kvtier.models.json_object import JsonObject
from kvtier.observe.printable import printable

_GROUP_SIZES = (-1, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqConfig:
    """Weights of 4 bits in groups of `group_size` inputs; None is one group for all inputs.

    `has_act_order`: groups are not runs of neighbouring inputs; `g_idx` is the group of each input.
    `is_zero_stored_less_one`: the first format of GPTQ checkpoints, in which a stored zero point of 7 means 8.
    """

    group_size: int | None
    has_act_order: bool = False
    is_zero_stored_less_one: bool = True


def read_quantization(fields: JsonObject) -> GptqConfig | None:
    """The quantisation in the config in `fields`, None if its weights are plain. Raises `ConfigError` for others."""
    if not fields.has("quantization_config"):
        return None
    inner = fields.inner("quantization_config")
    method = inner.text("quant_method")
    if method != "gptq":
        raise ConfigError(f"{inner.where}: quant_method {printable(repr(method))} is not known; known is gptq")
    if (bits := inner.count("bits")) != 4:
        raise ConfigError(f"{inner.where}: bits must be 4, not {bits}")
    group_size = inner.values.get("group_size", 128)
    if not isinstance(group_size, int) or group_size not in _GROUP_SIZES:
        raise inner.wrong("group_size", f"one of {', '.join(map(str, _GROUP_SIZES))}", group_size)
    for name in ("dynamic", "lm_head"):
        if inner.values.get(name):
            raise ConfigError(f"{inner.where}: {name} is not supported; all linear layers of a block must be quantised")
    stored_as = inner.text("checkpoint_format", "gptq")
    if stored_as not in ("gptq", "gptq_v2"):
        raise inner.wrong("checkpoint_format", "gptq or gptq_v2", stored_as)
    return GptqConfig(
        group_size=None if group_size == -1 else group_size,
        has_act_order=inner.flag("desc_act", False),
        is_zero_stored_less_one=stored_as == "gptq",
    )
