"""One deployment for all official clients: a tiny model behind a cache server and both APIs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtier.testing.tiny_models import save_tiny_model
from tests.support.deployments import DeploymentProcess

_MODEL = "tiny"
_MAX_MODEL_LEN = 2048
_DEPLOYMENT = """\
models:
  - model: tiny
    kv_cache_space: 32MiB
cache:
  memory: 64MiB
  disk: 64MiB
  folder: cache
"""


@dataclass(frozen=True, slots=True)
class Serving:
    """Where the APIs are, and what they serve. `openai_url` is without its `/v1`; no API key is needed."""

    openai_url: str
    ollama_url: str
    model: str
    max_model_len: int


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("serving")
    save_tiny_model(folder / _MODEL, "llama", max_position_embeddings=_MAX_MODEL_LEN)
    with DeploymentProcess(folder, _DEPLOYMENT) as deployment:
        yield Serving(deployment.openai_url, deployment.ollama_url, _MODEL, _MAX_MODEL_LEN)
