"""The environment: known names, bad values, and what no setting can do."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmha_dispatch.errors import SettingError
from fmha_dispatch.settings import PREFIX, VARIABLES, Settings, check_url, redact, redact_text

PACKAGE = Path(__file__).parents[2] / "fmha_dispatch"


def test_reads_each_variable() -> None:
    settings = Settings.from_environment(
        {
            "FMHA_DISPATCH_CACHE_DIR": "/c",
            "FMHA_DISPATCH_CUBIN_DIR": "/d",
            "FMHA_DISPATCH_MIRRORS": "https://a.example/x file:///mnt/m",
            "FMHA_DISPATCH_OFFLINE": "yes",
            "FMHA_DISPATCH_LOG_LEVEL": "debug",
            "FMHA_DISPATCH_FETCH_SECONDS": "7.5",
        }
    )
    assert (settings.cache_dir, settings.cubin_dir) == (Path("/c"), Path("/d"))
    assert settings.mirrors == ("https://a.example/x", "file:///mnt/m")
    assert (settings.offline, settings.log_level) == (True, "DEBUG")
    assert (settings.limits.total_s, settings.limits.try_s) == (7.5, 7.5)


def test_empty_value_is_unset() -> None:
    assert Settings.from_environment({name: "" for name in VARIABLES}) == Settings.from_environment({})


@pytest.mark.parametrize(
    ("env", "want"),
    [
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, Path("/x/fmha_dispatch")),
        ({"HOME": "/h"}, Path("/h/.cache/fmha_dispatch")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, Path("/h/.cache/fmha_dispatch")),
        ({"HOME": "/nonexistent"}, Path("/nonexistent/.cache/fmha_dispatch")),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_default_cache_dir(env: dict[str, str], want: Path | None) -> None:
    """T1.14: HOME unset or odd is no error; nothing is touched."""
    assert Settings.from_environment(env).cache_dir == want


@pytest.mark.parametrize("typo", ["FMHA_DISPATCH_CACHEDIR", "FMHA_DISPATCH_OFF_LINE", "FMHA_DISPATCH_MIRROR"])
def test_unknown_variable_is_warned_of(typo: str, caplog: pytest.LogCaptureFixture) -> None:
    """T1.04: a renamed variable does not silently do nothing."""
    closest = {"CACHEDIR": "CACHE_DIR", "OFF_LINE": "OFFLINE", "MIRROR": "MIRRORS"}[typo.removeprefix(PREFIX)]
    with caplog.at_level(logging.WARNING, logger="fmha_dispatch"):
        Settings.from_environment({typo: "1"})
    assert typo in caplog.text
    assert f"did you mean {PREFIX}{closest}?" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CACHE_DIR", "relative/path"),
        ("CACHE_DIR", "/a\0b"),
        ("OFFLINE", "maybe"),
        ("LOG_LEVEL", "LOUD"),
        ("FETCH_SECONDS", "nan"),
        ("FETCH_SECONDS", "-1"),
        ("FETCH_SECONDS", "1e9"),
        ("MIRRORS", "ftp://a/b"),
        ("MIRRORS", "https://"),
        ("MIRRORS", "file://host/path"),
        ("MIRRORS", "https://a:port/"),
        ("MIRRORS", "https://[::1/"),
    ],
)
def test_bad_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingError, match=PREFIX + name):
        Settings.from_environment({PREFIX + name: value})


@settings(deadline=None)
@given(st.sampled_from(sorted(VARIABLES)), st.text())
def test_any_value_is_taken_or_refused_by_name(name: str, value: str) -> None:
    """Fault 26: random values per setting give a typed error that names the variable, or settings."""
    try:
        assert isinstance(Settings.from_environment({name: value}), Settings)
    except SettingError as error:
        assert name in str(error)


def test_bad_mirror_does_not_leak_its_password() -> None:
    with pytest.raises(SettingError) as caught:
        Settings.from_environment({PREFIX + "MIRRORS": "ftp://user:secret@host/x?sig=secret"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("https://us:se/cret@host/x", 1),
        ("https://us:12/cret@host/x", 1),
        ("https://us:se?cret@host/x", 1),
        ("https://us:12?cret@host/x", 1),
        ("https://us:se#cret@host/x", 1),
        ("https://good.example/a https://us:se/cret@host/x", 2),
        ("https://user:se cret@host/x", 1),
        ("https://user:12 cret@host/x", 2),
        ("https:user:secret@host/x", 1),
        ("//user:secret@host/x", 1),
        ("secret", 1),
        ("secret://host", 1),
        ("https://us:s\u00e9cret@host/x", 1),
        ("file://user:secret@host/x", 1),
    ],
)
def test_malformed_mirror_is_not_shown(text: str, position: int) -> None:
    """Nobody can tell where the password ends: the message has the position and the scheme, nothing else of it."""
    with pytest.raises(SettingError) as caught:
        Settings.from_environment({PREFIX + "MIRRORS": text})
    shown = str(caught.value) + json.dumps(caught.value.to_json())
    assert f"URL {position} (" in shown
    assert not re.search("se/|12|cret|host/|user:|us:", shown.replace("https, http, file", ""))
    with pytest.raises(SettingError, match="URL 3 ") as caught:
        check_url("--mirror", text, 3)
    assert "cret" not in str(caught.value)


def test_mirrors_that_are_sound() -> None:
    for url in ("https://u:p%40ss%2F@host:8/x?sig=a%40b", "HTTP://[::1]:8080/", "file:/mnt/x", "https://host"):
        assert check_url("--mirror", url, 1) == url


@pytest.mark.parametrize("name", sorted(set(VARIABLES) - {PREFIX + "MIRRORS"}))
def test_url_in_the_wrong_variable_is_not_shown(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.from_environment({name: "https://user:secret@host/x"})
    assert "secret" not in str(caught.value)


def test_redact_text() -> None:
    shown = redact_text("cannot use 'https://us:se/cret@host/x?sig=secret', nor http://b/c; ask x@y")
    assert "cret" not in shown and "us:" not in shown
    assert redact_text("cannot use http://b/c, see a/b") == "cannot use http://b/c, see a/b"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a", "https://host/a"),
        ("https://user:secret@host/a", "https://***@host/a"),
        ("https://host/a?X-Signature=secret#secret", "https://host/a?***"),
        ("https://u:p@ss/w@host/a", "https://***@host/a"),
        ("https://us:se?cret@host/a", "https://***@host/a"),
        ("https://us:se#cret@host/a?b#c", "https://***@host/a?***"),
        ("user:secret@host", "***@host"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    """Fault 27: no userinfo, no signed query."""
    assert redact(url) == shown


def test_only_settings_reads_the_environment() -> None:
    reads = re.compile(r"os\.environ|os\.getenv|environb|expanduser|Path\.home")
    found = [
        path.name for path in PACKAGE.rglob("*.py") if path.name != "settings.py" and reads.search(path.read_text())
    ]
    assert found == []


def test_no_setting_disables_digest_checks() -> None:
    assert not [name for name in VARIABLES if re.search("VERIFY|CHECK|DIGEST|HASH|SHA|INSECURE|SKIP", name)]
