"""Typed errors: what they say, and the exit code that each maps to."""

from __future__ import annotations

import pytest

from fmha_dispatch import errors
from fmha_dispatch.errors import ExitCode, FmhaError


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("InvalidArgument", 1),
        ("Unsupported", 1),
        ("SettingError", 1),
        ("ArtifactMissing", 3),
        ("IntegrityError", 4),
        ("FetchError", 5),
        ("StoreError", 6),
        ("DeviceError", 7),
        ("NotPrepared", 7),
        ("LockFileError", 8),
    ],
)
def test_exit_codes_are_the_documented_ones(name: str, code: int) -> None:
    assert getattr(errors, name)("sentence").exit_code == code


def test_every_exit_code_is_documented() -> None:
    from fmha_dispatch.cli import _MEANING

    assert set(_MEANING) == set(ExitCode)


def test_message_says_asked_found_and_fix() -> None:
    error = FmhaError("it stopped", asked="a", found="b", fix="c")
    assert str(error) == "it stopped; asked: a; found: b; fix: c"
    assert error.to_json() == {"kind": "FmhaError", "message": "it stopped", "asked": "a", "found": "b", "fix": "c"}


def test_absent_facts_are_left_out() -> None:
    assert str(FmhaError("it stopped")) == "it stopped"
    assert FmhaError("it stopped").to_json() == {"kind": "FmhaError", "message": "it stopped"}


def test_lists_reach_json() -> None:
    assert errors.ArtifactMissing("m", missing=["a", "b"]).to_json()["missing"] == ["a", "b"]
    assert errors.FetchError("m", attempts=["a"]).to_json()["attempts"] == ["a"]


def test_errors_are_also_the_builtin_kind() -> None:
    assert issubclass(errors.InvalidArgument, ValueError)
    assert issubclass(errors.Unsupported, NotImplementedError)
    assert issubclass(errors.DriverError, errors.DeviceError)
