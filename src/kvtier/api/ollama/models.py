"""Answers of Ollama's API about the models: `/api/tags`, `/api/show` and `/api/ps`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import msgspec

from kvtier.api.chat.conversation import can_call, can_think
from kvtier.api.engines import KnownModel, ServedModel
from kvtier.api.ollama.options import OLLAMA_NAMES
from kvtier.api.service import Service
from kvtier.api.vllm.engine import VllmHello
from kvtier.api.vllm.model import VllmModel
from kvtier.engine.process.messages import EngineHello
from kvtier.errors import EngineAway

_STAYS = timedelta(days=36500)
"""Models stay loaded as long as their deployment runs."""

_LEVELS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ARCHITECTURE_SUFFIX = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")


def tags(service: Service) -> dict[str, object]:
    """Every name of every model. If its engines are away, the name is all that is known of a model."""
    own = [_tag(service, model, name) for model in service.engines.models for name in model.listed_names]
    passed = [_tag_of_vllm(service, model, name) for model in service.vllm.models for name in model.listed_names]
    return {"models": [*own, *passed]}


def running(service: Service) -> dict[str, object]:
    """The models whose engines have connected, with the memory that these engines use together."""
    own = [_process(model) for model in service.engines.models if model.hello is not None]
    passed = [_process_of_vllm(model, model.hello) for model in service.vllm.models if model.hello is not None]
    return {"models": [*own, *passed]}


def description_of_vllm(model: VllmModel) -> dict[str, object]:
    """What vLLM tells of a model, which is little. Raises `EngineAway` while none of its engines has connected."""
    hello = model.hello
    if hello is None:
        raise EngineAway(f"the model {model.name} is starting")
    return {
        "modelfile": f"# written by kvtier\nFROM {hello.root or model.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(None),
        "model_info": {
            "general.architecture": "vllm",
            **({} if hello.max_model_len is None else {"vllm.context_length": hello.max_model_len}),
        },
        "modified_at": _time(hello.since),
        "capabilities": ["completion"],
    }


def _capabilities(model: KnownModel) -> list[str]:
    """Capabilities under Ollama's names: programs check these before they offer tools."""
    tools = ["tools"] if can_call(model) else []
    return ["completion", *tools, *(["thinking"] if can_think(model) else [])]


def description(model: KnownModel, hello: EngineHello) -> dict[str, object]:
    family = _family(hello)
    parameters = _parameters(model.options)
    return {
        "modelfile": _modelfile(hello, parameters),
        "parameters": "\n".join(f"{name:<30} {value}" for name, value in parameters),
        "template": hello.chat_template,
        "details": _details(hello),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": hello.num_parameters,
            f"{family}.context_length": hello.max_model_len,
            f"{family}.vocab_size": hello.vocab_size,
            "kvtier.block_tokens": hello.block_tokens,
            "kvtier.device_blocks": hello.num_blocks,
            "kvtier.device_kv_bytes": hello.kv_bytes,
        },
        "modified_at": _time(hello.started_at),
        "capabilities": _capabilities(model),
    }


def _tag(service: Service, model: ServedModel, name: str) -> dict[str, object]:
    hello = model.hello
    return {
        "name": name,
        "model": name,
        "modified_at": _time(service.started_at if hello is None else hello.started_at),
        "size": 0 if hello is None else hello.weights_bytes,
        "digest": "" if hello is None else hello.namespace,
        "details": _details(hello),
    }


def _tag_of_vllm(service: Service, model: VllmModel, name: str) -> dict[str, object]:
    hello = model.hello
    return {
        "name": name,
        "model": name,
        "modified_at": _time(service.started_at if hello is None else hello.since),
        "size": 0,
        "digest": "",
        "details": _details(None),
    }


def _process_of_vllm(model: VllmModel, hello: VllmHello) -> dict[str, object]:
    return {
        "name": model.name,
        "model": model.name,
        "size": 0,
        "digest": "",
        "details": _details(None),
        "expires_at": datetime.now(UTC) + _STAYS,
        "size_vram": 0,
        "context_length": hello.max_model_len or 0,
    }


def _process(model: ServedModel) -> dict[str, object]:
    hellos = [connection.hello for connection in model.connections if connection.hello is not None]
    return {
        "name": model.name,
        "model": model.name,
        "size": sum(_memory_bytes(hello) for hello in hellos),
        "digest": hellos[0].namespace,
        "details": _details(hellos[0]),
        "expires_at": datetime.now(UTC) + _STAYS,
        "size_vram": sum(_memory_bytes(hello) for hello in hellos if hello.device != "cpu"),
        "context_length": hellos[0].max_model_len,
    }


def _details(hello: EngineHello | None) -> dict[str, object]:
    family = "" if hello is None else _family(hello)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _count(0 if hello is None else hello.num_parameters),
        "quantization_level": "" if hello is None else _level(hello),
    }


def _memory_bytes(hello: EngineHello) -> int:
    return hello.weights_bytes + hello.kv_bytes


def _family(hello: EngineHello) -> str:
    return _ARCHITECTURE_SUFFIX.sub("", hello.architecture).lower()


def _level(hello: EngineHello) -> str:
    if hello.quantization:
        return hello.quantization.upper()
    dtype = hello.dtype.removeprefix("torch.")
    return _LEVELS.get(dtype, dtype.upper())


def _count(number: int) -> str:
    """A count in Ollama's notation: 7.6B, 494.03M, 900K."""
    if number >= 1_000_000_000:
        return f"{number / 1e9:.1f}B"
    if number >= 1_000_000:
        return f"{number / 1e6:.2f}M"
    return f"{number / 1e3:.0f}K" if number >= 1000 else str(number)


def _parameters(options: Mapping[str, object]) -> list[tuple[str, str]]:
    """Names and values under Ollama's names; each stop text is a parameter of its own."""
    lines: list[tuple[str, str]] = []
    for name, value in options.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        lines += [(OLLAMA_NAMES.get(name, name), msgspec.json.encode(one).decode()) for one in values]
    return lines


def _modelfile(hello: EngineHello, parameters: list[tuple[str, str]]) -> str:
    lines = ["# written by kvtier", f"FROM {hello.model}"]
    if hello.chat_template:
        lines.append(f'TEMPLATE """{hello.chat_template}"""')
    return "\n".join([*lines, *(f"PARAMETER {name} {value}" for name, value in parameters)]) + "\n"


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
