"""How these programs start and end: checked arguments, and one sentence for every error."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from urllib.parse import urlsplit

from examples.use_remote_KV_cache.asking import Refused
from kvtier.errors import ConfigError

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


def run_command(main: Callable[[], int]) -> int:
    """The exit status of `main`. SIGTERM becomes `SystemExit`, so that everything `main` has started is stopped."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted; everything was stopped", file=sys.stderr)
        return _INTERRUPTED
    except (Refused, ConfigError, OSError, RuntimeError, UnicodeDecodeError) as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def in_words(error: Exception) -> str:
    match error:
        case OSError(filename=str() as name, strerror=str() as reason):
            return f"{name}: {reason}"
        case UnicodeDecodeError():
            return "the document is not UTF-8 text"
    return str(error)


def base_url(text: str) -> str:
    """For argparse: `http://host:port`, without anything after it."""
    wrong = argparse.ArgumentTypeError(f"{text!r} is not http://host:port, such as http://127.0.0.1:8080")
    try:
        parts = urlsplit(text)
        is_base = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError as error:
        raise wrong from error
    if not is_base or parts.path.strip("/") or parts.query or parts.fragment:
        raise wrong
    return text.rstrip("/")


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(_TERMINATED)
