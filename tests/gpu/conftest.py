"""The driver keeps descriptors of its own from its first use on: they are open before the leak check looks."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def driver() -> None:
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.zeros(1, device="cuda")
