"""What an engine of vLLM sees of a machine's GPUs."""

from __future__ import annotations

import pytest

from kvtier.deploy.run.vllm_part import visible_gpus
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "environment", "found"),
    [
        ("auto", {}, {}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3"}, {}),
        ("cpu", {"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": ""}),
        ("cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda:1,0", {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a"}),
    ],
)
def test_an_engine_sees_its_own_gpus(device: str, environment: dict[str, str], found: dict[str, str]) -> None:
    assert visible_gpus(device, environment) == found


def test_a_gpu_that_nobody_sees_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="there is no device cuda:2"):
        visible_gpus("cuda:2", {"CUDA_VISIBLE_DEVICES": "0,1"})
