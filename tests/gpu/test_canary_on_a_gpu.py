"""The canary on a GPU: no sound block is found wrong, whatever computed it, and every wrong one is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.testing.servers import ServerProcess, cache_server
from kvtier.testing.tiny_models import save_tiny_model
from tests.integration.test_canary import NUM_TOKENS, WAYS, check_sound, find_all

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with cache_server(memory="256MiB") as process:
        yield process


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_layers", [3, 12])
def test_every_kind_of_wrong_block_is_found(tmp_path: Path, server: ServerProcess, dtype: str, num_layers: int) -> None:
    save_tiny_model(tmp_path, "qwen3", num_layers=num_layers)
    find_all(tmp_path, server, dtype, WAYS, NUM_TOKENS, device=DEVICE, kv_cache_space=32 << 20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("chunks", "batch", "num_layers"), [((8192, 31), 1, 3), ((24, 8192), 6, 3), ((64, 8192), 12, 16)]
)
def test_sound_blocks_are_never_found_wrong(
    tmp_path: Path, server: ServerProcess, dtype: str, chunks: tuple[int, int], batch: int, num_layers: int
) -> None:
    """Chunks, batches and blocks that decoding has filled, in CUDA graphs, too."""
    save_tiny_model(tmp_path, "qwen3", num_layers=num_layers)
    num_blocks = check_sound(tmp_path, server, dtype, chunks, batch, seed=2, device=DEVICE, kv_cache_space=64 << 20)
    assert num_blocks > 100
