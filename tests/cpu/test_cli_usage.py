"""Wrong command lines and settings: the user's error, in the form asked for, and no secret in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import run
from synthetic import make_cubins, make_lock

from fmha_dispatch.errors import ExitCode

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def lock(tmp_path: Path) -> str:
    path = tmp_path / "cubins.lock"
    path.write_text(make_lock(make_cubins(2, family="f")).dump())
    return str(path)


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["status", "--nonsense"], ["verify", "--layer", "x"]])
def test_wrong_command_line_is_the_users_error(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == ExitCode.USER
    assert "error:" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"],
        ["--json", "status"],
        ["nonsense", "--json"],
        ["status", "--json", "--nonsense"],
        ["status", "--json", "--lock"],
        ["verify", "--layer", "x", "--json"],
        ["fetch", "stray", "--json"],
        ["replay", "--json"],
    ],
)
def test_wrong_command_line_as_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """Who asked for JSON gets JSON for every outcome, on stdout; the code and stderr stay."""
    code, out, err = run(capsys, *arguments)
    assert code == ExitCode.USER
    error = json.loads(out)["error"]
    assert error["kind"] == "InvalidArgument" and error["message"]
    assert "usage: fmha-dispatch" in err and f"error: {error['message']}" in err
    code, out, _ = run(capsys, *[word for word in arguments if word != "--json"], "--nonsense")
    assert (code, out) == (ExitCode.USER, "")


def test_abbreviated_json_option(capsys: pytest.CaptureFixture[str], lock: str) -> None:
    code, out, _ = run(capsys, "fetch", "--lock", lock, "--family", "nope", "--js")
    assert (code, json.loads(out)["error"]["kind"]) == (ExitCode.USER, "InvalidArgument")


@pytest.mark.parametrize(
    "arguments",
    [
        ["{}"],
        ["fetch", "{}"],
        ["replay", "{}"],
        ["replay", "-", "--out", "{}"],
        ["status", "--mirror", "{}"],
        *(["fetch", f"--{name}", "{}"] for name in ("arch", "path", "lock", "folder", "cache-dir", "dest")),
        ["fetch", "--match", "[{}"],
        ["verify", "--layer", "{}"],
    ],
)
def test_no_message_shows_a_password(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    """A URL in the wrong place of the command line, or a malformed one in the right place."""
    for url in ("https://user:se/cret@host/x", "https://us:12/secret@host/x", "https://user:secret@host/x?sig=secret"):
        code, out, err = run(capsys, *[word.format(url) for word in arguments], "--json")
        assert "cret" not in out + err, (code, out, err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "nope"], "no such family; asked: nope"),
        (["--arch", "sm_1"], "no such arch"),
        (["--path", "f/../x"], "no such path"),
        (["--match", "("], "no regular expression"),
        (["--match", "zzz"], "no artifact matches"),
        (["--mirror", "gopher://x"], "--mirror"),
    ],
)
def test_wrong_choices(capsys: pytest.CaptureFixture[str], lock: str, arguments: list[str], message: str) -> None:
    code, _, err = run(capsys, "fetch", "--lock", lock, *arguments)
    assert code == ExitCode.USER
    assert message in err


def test_bad_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FMHA_DISPATCH_OFFLINE", "perhaps")
    code, _, err = run(capsys, "status")
    assert code == ExitCode.USER
    assert "FMHA_DISPATCH_OFFLINE" in err
