"""The text of a lock checked, field by field, into a `LockFile`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NoReturn, TypeAlias

from fmha_dispatch.errors import LockFileError
from fmha_dispatch.lockfile import SCHEMA, Artifact, Family, LockFile, Package, Table, Toolchain
from fmha_dispatch.settings import Limits

# One segment of a path: what needs no quoting in a shell, a URL or a file system; no dot in front.
_SEGMENT = r"[A-Za-z0-9_+=-][A-Za-z0-9_+=.-]{0,250}"
_URL = re.compile(r"https://[a-z0-9.-]+(?::[0-9]{1,5})?(?:/[A-Za-z0-9_+=.-]+)*/?")
_PATTERNS = {
    "path": (re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})+"), "FAMILY/NAME of letters, digits and _+=.-"),
    "sha256": (re.compile(r"[0-9a-f]{64}"), "64 lower-case hex digits"),
    "arch": (re.compile(r"sm_[1-9][0-9]{1,2}[af]?"), "sm_NN, sm_NNa or sm_NNf"),
    "symbol": (re.compile(r"[A-Za-z_$][A-Za-z0-9_$]{0,1022}"), "a kernel symbol"),
    "family": (re.compile(r"[a-z0-9][a-z0-9-]{0,62}"), "lower-case letters, digits and -"),
    "file": (re.compile(_SEGMENT), "a file name"),
    "folder": (re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*"), "a relative folder of letters, digits and _+=.-"),
    "module": (re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}"), "the name of a top-level Python package"),
    "version": (re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]{0,62}"), "a version"),
}

# Keys and indices from the document down to a field.
_Where: TypeAlias = "tuple[str | int, ...]"


class _Bad(Exception):
    """A malformed field: its path in the document, and what is wrong with it."""

    def __init__(self, where: _Where, message: str, found: object = None) -> None:
        self.where = where
        self.message = message
        self.found = found
        super().__init__(message)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Bad((twice,), "the key stands twice in one object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise _Bad((), f"{text} is not a number of the lock")


def _integer(text: str) -> int:
    if len(text) > 19:
        raise _Bad((), "a number is too long", text[:24] + "...")
    return int(text)


def parse(text: str, limits: Limits) -> LockFile:
    """The lock that `text` holds.

    Raises:
        LockFileError: naming line and field.
    """
    if len(text) > limits.lock_bytes:
        raise LockFileError(f"the lock is longer than {limits.lock_bytes} bytes")
    try:
        return _generated(text, limits) or _lock(_document(text), limits)
    except json.JSONDecodeError as error:
        raise LockFileError(f"line {error.lineno}: not JSON: {error.msg}", fix=_FIX) from None
    except RecursionError:
        raise LockFileError("nested too deep", fix=_FIX) from None
    except _Bad as bad:
        line = _line_of(text, bad.where)
        name = ".".join(map(str, bad.where)) or "document"
        found = None if bad.found is None else repr(bad.found)[:200]
        raise LockFileError(f"line {line}, field {name}: {bad.message}", found=found, fix=_FIX) from None


def _document(text: str) -> Any:
    return json.loads(
        text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_no_constant, parse_int=_integer
    )


_ARTIFACTS, _END = '\n"artifacts": [\n', "\n]\n}\n"
_NUMBER = "([1-9][0-9]{0,18})"
_ROW = re.compile(
    r"^\{"
    + ", ".join(
        f'"{field.name}": ' + (f'"({_PATTERNS[field.name][0].pattern})"' if field.name in _PATTERNS else _NUMBER)
        for field in fields(Artifact)
    )
    + r"\},$",
    re.MULTILINE,
)


def _generated(text: str, limits: Limits) -> LockFile | None:
    """The lock in a text laid out as `LockFile.dump` does it, in half the time: thousands of rows, one pattern.

    None for any other text and for any fault; the slow way then finds the field.
    """
    head, separator, rows = text.partition(_ARTIFACTS)
    if not separator or not rows.endswith(_END):
        return None
    # Sound JSON without its rows, and with each row an object of the schema's fields, is sound JSON with them.
    try:
        families = _lock(_document(head + separator + _END), limits).families
    except (json.JSONDecodeError, RecursionError, _Bad):
        return None
    rows = rows.removesuffix(_END) + ","
    found = _ROW.findall(rows)
    if len(found) != rows.count("\n") + 1 or len(found) > limits.artifacts:
        return None
    param_bytes = {name: str(family.param_bytes) for name, family in families.items()}
    artifacts = []
    for name, path, sha256, size, arch, parameters, symbol in found:
        bytes_ = int(size)
        if (
            param_bytes.get(name) != parameters
            or not path.startswith(name + "/")
            or len(path) > limits.path_chars
            or bytes_ > limits.cubin_bytes
        ):
            return None
        artifacts.append(Artifact(name, path, sha256, bytes_, arch, int(parameters), symbol))
    if len({artifact.path for artifact in artifacts}) != len(artifacts):
        return None
    artifacts.sort(key=lambda artifact: artifact.path)
    return LockFile(families, tuple(artifacts))


_FIX = "the lock is generated: reinstall fmha-dispatch, or run tools/build_cubins.py in a checkout"


def _line_of(text: str, where: _Where) -> int:
    """The line of a field, as well as a text search tells; the artifact's own line for an artifact's field."""
    offset = 0
    if where and where[0] == "artifacts" and len(where) > 1:
        start = re.search(r'"artifacts"\s*:\s*\[\s*', text)
        offset = start.end() if start else 0
        for _ in range(int(where[1])):
            _, offset = json.JSONDecoder().raw_decode(text, offset)
            gap = re.compile(r"[\s,]*").match(text, offset)
            offset = gap.end() if gap else offset
    else:
        for key in where:
            match = re.compile(re.escape(json.dumps(key)) + r"\s*:").search(text, offset)
            offset = match.start() if match else offset
    return text.count("\n", 0, offset) + 1


def _object(value: Any, where: _Where, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Bad(where, "is not an object", value)
    required = set(required)
    for name in sorted(required - value.keys()):
        raise _Bad((*where, name), "is missing")
    for name in sorted(value.keys() - required - set(optional)):
        raise _Bad((*where, name[:80]), "is not a field of this schema")
    return value


def _text(value: Any, kind: str, where: _Where) -> str:
    pattern, want = _PATTERNS[kind]
    if type(value) is not str or not pattern.fullmatch(value):
        raise _Bad(where, f"is not {want}", value)
    return value


def _count(value: Any, most: int, where: _Where) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise _Bad(where, f"is not an integer from 1 to {most}", value)
    return value


def _list(value: Any, where: _Where, most: int) -> list[Any]:
    if not isinstance(value, list):
        raise _Bad(where, "is not a list", value)
    if len(value) > most:
        raise _Bad(where, f"has more than {most} entries", len(value))
    return value


def _lock(document: Any, limits: Limits) -> LockFile:
    top = _object(document, (), ("schema", "families", "artifacts"))
    if type(top["schema"]) is not int or top["schema"] != SCHEMA:
        raise _Bad(("schema",), f"this version reads schema {SCHEMA}", top["schema"])
    if not isinstance(top["families"], dict):
        raise _Bad(("families",), "is not an object", top["families"])
    families = {}
    for name, entry in top["families"].items():
        _text(name, "family", ("families", name[:80]))
        families[name] = _family(entry, ("families", name), limits)
    entries = _list(top["artifacts"], ("artifacts",), limits.artifacts)
    artifacts = [_artifact(entry, index, families, limits) for index, entry in enumerate(entries)]
    paths: set[str] = set()
    for index, artifact in enumerate(artifacts):
        if artifact.path in paths:
            raise _Bad(("artifacts", index, "path"), "stands twice", artifact.path)
        paths.add(artifact.path)
    artifacts.sort(key=lambda artifact: artifact.path)
    return LockFile(families, tuple(artifacts))


def _family(value: Any, where: _Where, limits: Limits) -> Family:
    optional = ("pack", "repositories", "table", "toolchain", "package")
    entry = _object(value, where, ("param_bytes", "layout"), optional)
    repositories = _list(entry.get("repositories", []), (*where, "repositories"), 16)
    for url in repositories:
        if type(url) is not str or not _URL.fullmatch(url):
            raise _Bad((*where, "repositories"), "is not a plain https URL (not shown, it may hold a password)")
    table = toolchain = pack = package = None
    if "pack" in entry:
        pack = _text(entry["pack"], "file", (*where, "pack"))
    if "table" in entry:
        at = (*where, "table")
        row = _object(entry["table"], at, ("file", "sha256", "size"))
        table = Table(
            _text(row["file"], "file", (*at, "file")),
            _text(row["sha256"], "sha256", (*at, "sha256")),
            _count(row["size"], limits.table_bytes, (*at, "size")),
        )
    if "toolchain" in entry:
        at = (*where, "toolchain")
        tools = _object(entry["toolchain"], at, ("nvcc", "flags"))
        flags = _list(tools["flags"], (*at, "flags"), 64)
        for flag in flags:
            if type(flag) is not str or not flag.isascii() or not flag.isprintable() or len(flag) > 200:
                raise _Bad((*at, "flags"), "is not a compiler flag", flag)
        toolchain = Toolchain(_text(tools["nvcc"], "version", (*at, "nvcc")), tuple(flags))
    if "package" in entry:
        at = (*where, "package")
        carrier = _object(entry["package"], at, ("module", "folder"))
        package = Package(
            _text(carrier["module"], "module", (*at, "module")), _text(carrier["folder"], "folder", (*at, "folder"))
        )
    return Family(
        _count(entry["param_bytes"], 32764, (*where, "param_bytes")),
        _text(entry["layout"], "version", (*where, "layout")),
        pack,
        tuple(repositories),
        table,
        toolchain,
        package,
    )


_ARTIFACT_FIELDS = frozenset(f.name for f in fields(Artifact))


def _artifact(value: Any, index: int, families: dict[str, Family], limits: Limits) -> Artifact:
    where = ("artifacts", index)
    if not isinstance(value, dict) or value.keys() != _ARTIFACT_FIELDS:
        value = _object(value, where, _ARTIFACT_FIELDS)
    name = value["family"]
    family = families.get(name) if type(name) is str else None
    if family is None:
        raise _Bad((*where, "family"), "is not in families", name)
    path = _text(value["path"], "path", (*where, "path"))
    if len(path) > limits.path_chars:
        raise _Bad((*where, "path"), f"is longer than {limits.path_chars} characters", path)
    if not path.startswith(name + "/"):
        raise _Bad((*where, "path"), f"does not lie under {name}/", path)
    param_bytes = value["param_bytes"]
    if type(param_bytes) is not int or param_bytes != family.param_bytes:
        raise _Bad((*where, "param_bytes"), f"differs from the family's {family.param_bytes}", param_bytes)
    return Artifact(
        name,
        path,
        _text(value["sha256"], "sha256", (*where, "sha256")),
        _count(value["size"], limits.cubin_bytes, (*where, "size")),
        _text(value["arch"], "arch", (*where, "arch")),
        param_bytes,
        _text(value["symbol"], "symbol", (*where, "symbol")),
    )
