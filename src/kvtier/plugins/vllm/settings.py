"""What `kv_connector_extra_config` may say, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from kvtier.errors import ConfigError
from kvtier.transport.address import parse_address


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`server` is where a cache server listens. `store` says whether answers are kept too, or prompts only.

    Prompts of engines with different `salt` share no blocks. A scheduler waits at most `match_timeout_s` for what the
    server has of a prompt, and computes it then.
    """

    server: str
    token_file: str | None = None
    ca_file: str | None = None
    salt: str = ""
    timeout_s: float = 1.0
    match_timeout_s: float = 0.25
    store: Literal["all", "prompt"] = "all"

    def __post_init__(self) -> None:
        parse_address(self.server)
        for name in ("timeout_s", "match_timeout_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ConfigError(f"{name} must be a number of seconds, not {getattr(self, name)}")

    def token(self) -> bytes | None:
        if self.token_file is None:
            return None
        try:
            return Path(self.token_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"cannot read the token in {self.token_file}: {error.strerror}") from error


def read_settings(extra_config: Mapping[str, object]) -> ConnectorSettings:
    """Raises `ConfigError` with one sentence that names the setting."""
    if "server" not in extra_config:
        raise ConfigError('kvtier: kv_connector_extra_config needs "server", such as unix:/run/kvtier.sock')
    try:
        return msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(ConnectorSettings.__struct_fields__)
        raise ConfigError(f"kvtier: kv_connector_extra_config: {error} (known: {known})") from error
