"""What every CPU test starts from."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def library_logger() -> Iterator[None]:
    """A command run inside a test owns the process's logging; the next test must not see what it set."""
    yield
    logger = logging.getLogger("fmha_dispatch")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
