"""Where a model's folder is: a folder as given, or a snapshot that the hub's client keeps in its cache.

The client has its own settings and reads them from its environment: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
Offline, or when the hub does not answer, what is in the cache is used.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
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
from kvtier.observe.printable import printable

logger = logging.getLogger(__name__)

_SMALL_FILES = ["*.json", "*.txt", "*.jinja", "*.model", "tokenizer*"]
_WEIGHT_FILES = ["*.safetensors"]
_NEVER = ["consolidated*", "original/*", "*/*"]  # the same weights once more, in another form


class _TerminalBar(tqdm):
    """The client's progress bar, silent when stderr is no terminal."""

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

    `has_weights` False leaves out the weights. Raises `ConfigError` when there is no such folder and no such model.
    """
    try:
        folder = Path(model).expanduser()
        is_path = isinstance(model, Path) or _is_path(model) or folder.exists()
        if folder.is_dir():
            return folder
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, no home behind a ~
        raise ConfigError(f"there is no model folder {printable(str(model))}") from error
    if is_path:
        raise ConfigError(f"there is no model folder {printable(str(model))}")
    assert isinstance(model, str)
    return _download(model, revision, cache_dir, [*_SMALL_FILES, *(_WEIGHT_FILES if has_weights else [])], endpoint)


def _is_path(model: str) -> bool:
    return model.startswith(("/", ".", "~")) or model.count("/") != 1


def _download(
    model: str, revision: str | None, cache_dir: str | Path | None, patterns: list[str], endpoint: str | None
) -> Path:
    at = f" at revision {revision}" if revision else ""
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
    except HFValidationError as error:
        raise ConfigError(f"{model} is neither a folder nor a name on the hub") from error
    except GatedRepoError as error:
        raise ConfigError(
            f"the model {model} may only be downloaded by those it was granted to: set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"there is no folder {model} and no public model of that name on the hub") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the model {model} has no revision {revision}") from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"there is no folder {model}, and the model{at} is not in the cache while the hub is off or out of reach"
        ) from error
    except (HTTPError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the model {model}{at} cannot be downloaded: {reason}") from error
    return Path(snapshot)
