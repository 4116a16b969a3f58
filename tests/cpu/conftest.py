"""What every CPU test starts from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_server import FaultServer
from synthetic import REMOTE


@pytest.fixture(autouse=True)
def library_logger() -> Iterator[None]:
    """A command run inside a test owns the process's logging; the next test must not see what it set."""
    yield
    logger = logging.getLogger("fmha_dispatch")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local servers are asked directly, whatever this machine's proxy."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the person who runs the tests."""
    for name in [name for name in os.environ if name.startswith("FMHA_DISPATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """A mirror that holds `synthetic.REMOTE`."""
    with FaultServer(REMOTE).running() as running:
        yield running


@pytest.fixture
def other() -> Iterator[FaultServer]:
    """A second mirror like `server`."""
    with FaultServer(REMOTE).running() as running:
        yield running
