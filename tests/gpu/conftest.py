"""GPU tests are collected only by ``pytest -m gpu tests/gpu`` on a machine with an sm_90 GPU; elsewhere they fail."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def workspace() -> torch.Tensor:
    """Scratch that starts as NaN bytes: nothing may depend on its content."""
    return torch.full((128 * 2**20,), 0xFF, dtype=torch.uint8, device="cuda")
