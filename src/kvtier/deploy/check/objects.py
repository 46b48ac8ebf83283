"""Checks before anything is started that an object store answers, and that blocks can be read and written."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from kvtier.errors import ConfigError, TierError
from kvtier.stores.objects.bucket import Bucket
from kvtier.stores.objects.config import ObjectsConfig

_ANSWER_S = 5.0


def notes_on_objects(config: ObjectsConfig) -> Iterator[str]:
    """A sentence if a small object cannot be written, read and deleted. Takes seconds without an answer."""
    try:
        bucket = Bucket(config.url, config.settings, limit_s=_ANSWER_S, allow_http=config.allows_http)
    except ConfigError as error:
        yield str(error)
        return
    name = f"kvt1/check-{uuid.uuid4().hex}"
    try:
        bucket.write(name, [b"kvtier"])
        if bucket.read(name, 2, 6) != b"tier":
            yield f"object store {config.url} does not give back what was written"
        bucket.delete([name], time.monotonic() + _ANSWER_S)
    except TierError as error:
        yield str(error)
    finally:
        bucket.close()
