"""Fixtures for tests that need a driver but no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_driver.driver import FakeDriver, build, load


@pytest.fixture(scope="session")
def fake_libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the fake library, for tests that load it in a process of their own."""
    return build(tmp_path_factory.mktemp("fake_driver"))


@pytest.fixture
def fake(fake_libcuda: Path) -> Iterator[FakeDriver]:
    """The fake driver in this process: two H200s, an empty record, no context current."""
    driver = load(fake_libcuda)
    driver.reset()
    yield driver
    driver.reset()
