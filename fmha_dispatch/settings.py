"""Settings and limits. The only file that reads the environment."""

from __future__ import annotations

import difflib
import logging
import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fmha_dispatch.errors import SettingError

PREFIX = "FMHA_DISPATCH_"

_log = logging.getLogger("fmha_dispatch")


@dataclass(frozen=True)
class Limits:
    """Every bound in one place, so that nothing read from a file or a server can grow without one.

    Attributes:
        lock_bytes: size of ``cubins.lock``.
        artifacts: artifacts in a lock.
        path_chars: length of an artifact's path.
        cubin_bytes: size of one cubin.
        table_bytes: size of a packed manifest table.
        elf_sections, elf_symbols, elf_relocations, elf_attributes: entries of a cubin that its reader will look at.
        wrong_artifacts: artifacts that a base URL may give as wrong bytes, and none right, before it is given up.
        unreached_artifacts: artifacts for which a base URL may not answer, and deliver none, before it is given up.
        call_chars: length of a recorded call, one line of JSON.
        call_lines: lines of that length that are read past to find the end of a longer one.
        tries: requests to one mirror for one artifact.
        redirects: hops that one request may take.
        retry_after_s: longest wait that a server may ask for.
        backoff_s: first wait between tries, doubled each time.
        connect_s, read_s: until a connection stands, and between two packets.
        try_s: one request, body included.
        total_s: one artifact, all tries and mirrors.
        min_bytes_per_s, min_rate_after_s: slower than this for that long is given up.
        lock_wait_s: how long to wait for another process that fetches the same artifact.
        stale_temp_s: age at which a temporary file of a dead process is swept.
    """

    lock_bytes: int = 32 << 20
    artifacts: int = 100_000
    path_chars: int = 512
    cubin_bytes: int = 64 << 20
    table_bytes: int = 16 << 20
    elf_sections: int = 256
    elf_symbols: int = 1024
    elf_relocations: int = 2048
    elf_attributes: int = 2048
    wrong_artifacts: int = 8
    unreached_artifacts: int = 4
    call_chars: int = 1 << 20
    call_lines: int = 16
    tries: int = 4
    redirects: int = 3
    retry_after_s: float = 120.0
    backoff_s: float = 0.5
    connect_s: float = 10.0
    read_s: float = 15.0
    try_s: float = 120.0
    total_s: float = 300.0
    min_bytes_per_s: float = 10_000.0
    min_rate_after_s: float = 15.0
    lock_wait_s: float = 60.0
    stale_temp_s: float = 3600.0


LIMITS = Limits()


@dataclass(frozen=True)
class Settings:
    """What a user may change. There is no setting that skips a digest check.

    Attributes:
        cache_dir: user cache; None when no place is known for it (then bytes are used from memory).
        cubin_dir: folder looked at before everything that is installed, laid out by artifact path.
        mirrors: base URLs tried in order before the repositories that the lock names; artifacts lie below by path.
        offline: never open a connection.
        log_level: level that the command line sets; the library itself leaves logging alone.
        limits: bounds on sizes, retries and seconds.
    """

    cache_dir: Path | None = None
    cubin_dir: Path | None = None
    mirrors: tuple[str, ...] = ()
    offline: bool = False
    log_level: str = "WARNING"
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Reads ``FMHA_DISPATCH_*``; an unknown name of that form is warned of, with the closest known one.

        Args:
            environment: instead of the process's own.

        Raises:
            SettingError: a value that cannot be used.
        """
        env = os.environ if environment is None else environment
        for name in sorted(env):
            if name.startswith(PREFIX) and name not in VARIABLES:
                close = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.0)[0]
                _log.warning("unknown environment variable %s is ignored; did you mean %s?", name, close)
        values: dict[str, object] = {"cache_dir": _default_cache_dir(env)}
        for name, (attribute, read, _) in VARIABLES.items():
            text = env.get(name)
            if text:
                values[attribute] = read(name, text)
        return cls(**values)  # type: ignore[arg-type]


def _bad(name: str, text: str, want: str) -> SettingError:
    # A URL in the wrong variable may hold a password as well as in the right one.
    found = "a URL, not shown" if "://" in text or "@" in text else repr(text[:200])
    return SettingError(f"{name} has an unusable value", found=found, fix=f"set it to {want}, or unset it")


def _folder(name: str, text: str) -> Path:
    path = Path(text)
    if "\0" in text or not path.is_absolute():
        raise _bad(name, text, "an absolute path")
    return path


def _flag(name: str, text: str) -> bool:
    value = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    try:
        return value[text.lower()]
    except KeyError:
        raise _bad(name, text, "1 or 0") from None


def _level(name: str, text: str) -> str:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise _bad(name, text, "DEBUG, INFO, WARNING or ERROR")
    return text.upper()


def _seconds(name: str, text: str) -> Limits:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 86400:
        raise _bad(name, text, "seconds from 0.1 to 86400")
    return Limits(total_s=value, try_s=min(value, LIMITS.try_s))


def _mirrors(name: str, text: str) -> tuple[str, ...]:
    return tuple(check_url(name, url, position) for position, url in enumerate(text.split(), 1))


def check_url(name: str, url: str, position: int) -> str:
    """`url`, the one at `position` (from 1) of `name`, if artifacts can be fetched below it.

    Raises:
        SettingError: naming `name`, the position and the scheme. The URL itself is not shown: where the password ends
            cannot be told in one that is malformed.
    """
    scheme = next((known for known in ("https", "http", "file") if url.lower().startswith(known + ":")), None)
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port
        # A password with / ? or # ends the host early and leaves its @ behind.
        hides_password = url.count("@") > parts.netloc.count("@")
        has_host = bool(parts.netloc.rpartition("@")[2].partition(":")[0])
        sound = scheme is not None and url.isascii() and url.isprintable() and " " not in url and not hides_password
        sound = sound and (parts.path.startswith("/") and not parts.netloc if scheme == "file" else has_host)
    except ValueError:
        sound = False
    if not sound:
        raise SettingError(
            f"{name} has an unusable value",
            found=f"URL {position} ({scheme or 'another scheme'}) is malformed; not shown, as it may hold a password",
            fix=f"set {name} to base URLs (https, http, file) separated by spaces, with special characters of user and "
            "password as %XX, or leave it out",
        )
    return url


def redact(url: str) -> str:
    """`url` fit for a log: no user, no password, no query (it may be signed), no fragment."""
    scheme, separator, rest = url.partition("://")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        scheme, separator, rest = "", "", url
    # All up to the last @: a password may hold any character.
    _, user, rest = rest.rpartition("@")
    path = re.split("[?#]", rest, maxsplit=1)[0]
    return scheme + separator + ("***@" if user else "") + path + ("?***" if "?" in rest else "")


def redact_text(text: str) -> str:
    """`text` with every URL in it redacted, for messages that other code has made."""
    return re.sub(r"[A-Za-z][A-Za-z0-9+.-]*://(?:.*@)?[^\s'\"<>)]*", lambda url: redact(url[0]), text)


def _default_cache_dir(env: Mapping[str, str]) -> Path | None:
    """XDG's place, or None: HOME may be unset or a stand-in like ``/``, and nothing is written here yet."""
    for base in (env.get("XDG_CACHE_HOME"), env.get("HOME") and os.path.join(env["HOME"], ".cache")):
        if base and os.path.isabs(base) and "\0" not in base:
            return Path(base) / "fmha_dispatch"
    return None


# Variable -> attribute of Settings, reader, meaning.
VARIABLES: dict[str, tuple[str, Callable[[str, str], object], str]] = {
    PREFIX + "CACHE_DIR": ("cache_dir", _folder, "user cache of fetched cubins"),
    PREFIX + "CUBIN_DIR": ("cubin_dir", _folder, "folder of cubins that is looked at first"),
    PREFIX + "MIRRORS": ("mirrors", _mirrors, "base URLs, separated by spaces, tried before the lock's repositories"),
    PREFIX + "OFFLINE": ("offline", _flag, "1: never open a connection"),
    PREFIX + "LOG_LEVEL": ("log_level", _level, "what the command line logs to stderr"),
    PREFIX + "FETCH_SECONDS": ("limits", _seconds, "deadline of one artifact, all tries and mirrors"),
}
