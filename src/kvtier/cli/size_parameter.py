"""A number of bytes on the command line, such as 20GiB."""

from __future__ import annotations

from typing import Any

import click

from kvtier.errors import ConfigError
from kvtier.sizes import parse_size


class SizeParameter(click.ParamType[int]):
    """The parameter type of such options."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
