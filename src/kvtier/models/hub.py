"""Where a model's folder is: a given folder, or a snapshot that the hub's client keeps in its cache.

The client has its own settings and reads them from its environment: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
If it is offline, or the hub does not answer, the cache is used.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HFValidationError,
    HTTPError,  # of whichever HTTP library the client uses
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

from kvtier.errors import ConfigError
from kvtier.models.foreign_files import gguf_error, is_gguf_name
from kvtier.observe.printable import printable

logger = logging.getLogger(__name__)

_ANSWER_S = 5.0
_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "tokenizer*"]
_WEIGHT_FILES = ["*.safetensors"]
_NEVER = ["consolidated*", "original/*", "*/*"]  # the same weights again, in another form


class _TerminalBar(tqdm):
    """The client's progress bar, silent unless stderr is a terminal."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings["disable"] = settings.get("disable") or not sys.stderr.isatty()
        super().__init__(*args, **settings)  # type: ignore[no-untyped-call]


def find_model_folder(
    model: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    has_weights: bool = True,
    endpoint: str | None = None,
) -> Path:
    """The folder of `model`, downloaded first if it is the name of a model on the hub and not in the cache.

    `has_weights` False leaves out the weights. Raises `ConfigError` if there is no such folder and no such model.
    """
    try:
        folder = Path(model).expanduser()
        is_path = isinstance(model, Path) or _is_path(model) or folder.exists()
        if folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, no home behind a ~
        raise ConfigError(f"there is no model folder {printable(str(model))}") from error
    if is_gguf_name(str(model)):
        raise gguf_error(model)
    if is_path:
        raise ConfigError(f"there is no model folder {printable(str(model))}")
    assert isinstance(model, str)
    return _download(model, revision, cache_dir, [*_SMALL_FILES, *(_WEIGHT_FILES if has_weights else [])], endpoint)


def hub_problem(model: str, *, revision: str | None = None, endpoint: str | None = None) -> str:
    """Why the hub would refuse `model`, in a sentence; empty if it would not. Nothing is downloaded."""
    try:
        HfApi(endpoint=endpoint).model_info(model, revision=revision, timeout=_ANSWER_S)
    except (HFValidationError, HTTPError, OSError) as error:  # being offline is an OSError, too
        return _sentence(model, revision, error) or (
            f"{model} is not on this machine, and the hub is off or out of reach: whether there is such a model cannot "
            "be told now"
        )
    return ""


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") != 1


def _download(
    model: str, revision: str | None, cache_dir: str | Path | None, patterns: list[str], endpoint: str | None
) -> Path:
    at = _at(revision)
    logger.info("looking for %s%s on the hub, and downloading what is not in the cache", model, at)
    try:
        snapshot = snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=patterns,
            ignore_patterns=_NEVER,
            endpoint=endpoint,
            tqdm_class=_TerminalBar,
        )
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {model}, and the model{at} is not in the cache while the hub is off or out of reach"
        ) from error
    except (HFValidationError, HTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        sentence = _sentence(model, revision, error) or f"the model {model}{at} cannot be downloaded: {reason}"
        raise ConfigError(sentence) from error
    return Path(snapshot)


def _sentence(model: str, revision: str | None, error: Exception) -> str:
    """The hub's, or its client's, objection to the name itself; empty for other errors."""
    if isinstance(error, HFValidationError):
        return f"{model} is neither a folder nor a name on the hub"
    if isinstance(error, GatedRepoError):
        return f"the model {model} may only be downloaded by those it was granted to: set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no folder {model} and no public model of that name on the hub"
    if isinstance(error, RevisionNotFoundError):
        return f"the model {model} has no revision {revision}"
    return ""


def _at(revision: str | None) -> str:
    return f" at revision {revision}" if revision else ""
