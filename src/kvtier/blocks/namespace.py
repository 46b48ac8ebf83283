"""The owner of a block: a digest over everything that changes its bytes or their meaning.

Two processes share blocks exactly when every field here is equal. Paths, names and times are not fields: a
copied model folder hits, new weights under an old name miss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from kvtier.blocks.layout import KvLayout
from kvtier.errors import ConfigError

Namespace = NewType("Namespace", bytes)
"""A SHA-256 digest, 32 bytes."""

NAMESPACE_BYTES = 32
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields:
    """The fields that the digest covers.

    `model_config` is the model's config with every override applied (rope scaling too); `weights` comes from
    `weights_identity`; `first_layer` tells pipeline stages apart; `salt` separates tenants.
    """

    layout: KvLayout
    weights: str
    model_config: Mapping[str, object] = field(default_factory=dict)
    quantization: str = ""
    compute_dtype: str = ""
    first_layer: int = 0
    lora: str = ""
    salt: str = ""

    def digest(self) -> Namespace:
        """The namespace: stable over processes, restarts, machines and Python versions."""
        return Namespace(hashlib.sha256(self._text().encode()).digest())

    def document(self) -> dict[str, object]:
        """The fields as plain JSON values, with a digest in place of the salt, which may be a tenant's secret."""
        document: dict[str, object] = json.loads(self._text())
        document["salt"] = hashlib.sha256(self.salt.encode()).hexdigest()[:16] if self.salt else ""
        return document

    def description(self) -> str:
        """`document` as JSON in ASCII."""
        return json.dumps(self.document(), separators=(",", ":"))

    def _text(self) -> str:
        layout = self.layout
        fields = {
            "format": FORMAT_VERSION,
            "model_config": self.model_config,
            "weights": self.weights,
            "quantization": self.quantization,
            "compute_dtype": self.compute_dtype or layout.dtype,
            "kv_dtype": layout.dtype,
            "block_tokens": layout.block_tokens,
            "layers": layout.layers,
            "first_layer": self.first_layer,
            "kv_heads": layout.kv_heads,
            "head_dim": layout.head_dim,
            "lora": self.lora,
            "salt": self.salt,
        }
        try:
            return json.dumps(
                fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_as_dict
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model_config must hold plain JSON values only: {error}") from error


def namespace_differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The fields in which two documents differ, sorted, nested ones with dots: `model_config.rope.theta`.

    Lists are compared as a whole.
    """
    found: list[str] = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += [f"{name}.{inner}" for inner in namespace_differences(one, other)]
        elif (name in ours) != (name in theirs) or _written(one) != _written(other):
            found.append(name)
    return found


def _written(value: object) -> str:
    """A value as the digest sees it: 1, 1.0 and true are different."""
    return json.dumps(value, sort_keys=True)


def _as_dict(value: object) -> dict[object, object]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not plain JSON")
