"""cubins.lock: strict in, deterministic out, every refusal with line and field."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_cubins, make_lock

from fmha_dispatch import lock_parser
from fmha_dispatch.errors import LockFileError
from fmha_dispatch.lockfile import Artifact, Family, LockFile, Table, Toolchain, installed_lock
from fmha_dispatch.settings import LIMITS

FAMILY = Family(
    1280,
    "1",
    "hopper.zip",
    ("https://host.example/a/b",),
    Table("hopper.manifest", "0" * 64, 100),
    Toolchain("13.0.88", ("-cubin", "-O3")),
)
LOCK = LockFile(
    {"hopper": FAMILY, "other": Family(1408, "2")},
    (
        Artifact("hopper", "hopper/a.cubin", "a" * 64, 1000, "sm_90a", 1280, "a_kernel"),
        Artifact("hopper", "hopper/sub/b.cubin", "b" * 64, 1, "sm_100f", 1280, "_Z1bv"),
        Artifact("other", "other/c.cubin", "c" * 64, 64 << 20, "sm_120", 1408, "c$"),
    ),
)


def changed(change: Any) -> str:
    """The text of LOCK after `change(document)`."""
    document = json.loads(LOCK.dump())
    change(document)
    return json.dumps(document, indent=1)


def with_artifact(**fields: object) -> str:
    """The text of LOCK, generated layout, with fields of the second artifact replaced."""
    lines = LOCK.dump().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if "hopper/sub/b.cubin" in line)
    entry = json.loads(lines[index].rstrip(",\n"))
    entry.update(fields)
    lines[index] = json.dumps(entry) + ",\n"
    return "".join(lines)


def test_round_trip_and_layout() -> None:
    text = LOCK.dump()
    assert LockFile.parse(text) == LOCK
    assert LockFile.parse(text).dump() == text
    for artifact in LOCK.artifacts:
        assert sum(artifact.path in line for line in text.splitlines()) == 1  # one artifact a line


def test_dump_does_not_depend_on_order() -> None:
    shuffled = LockFile(dict(reversed(LOCK.families.items())), tuple(reversed(LOCK.artifacts)))
    assert shuffled.dump() == LOCK.dump()


def test_replace_family_keeps_the_others() -> None:
    only = dataclasses.replace(LOCK.artifacts[0], sha256="d" * 64)
    lock = LOCK.replace_family("hopper", FAMILY, [only])
    assert lock.of_family("hopper") == (only,)
    assert lock.of_family("other") == LOCK.of_family("other")
    assert LockFile.parse(lock.dump()) == lock


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "hopper/../x",
        "/etc/x",
        "hopper//b",
        "hopper/./b",
        "hopper/.hidden",
        "hopper/",
        "hopper",
        "hopper/a\0b",
        "hopper\\b",
        "hopper/a b",
        "hopper/b\n",
        "hopper/" + "x" * 252,
        "hopper/" + "/".join(["x" * 100] * 6),
        "hopper/" + "x" * 4096,
        "hopper/\uff42.cubin",
        "h\u043epper/b.cubin",
        "other/b.cubin",
        "",
        5,
        None,
    ],
)
def test_hostile_path(path: object) -> None:
    """Fault 13: traversal, absolute, doubled slashes, NUL, backslash, long names, look-alikes."""
    with pytest.raises(LockFileError, match=r"line 9, field artifacts\.1\.path"):
        LockFile.parse(with_artifact(path=path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sha256", "A" * 64),
        ("sha256", "a" * 63),
        ("sha256", "a" * 32),
        ("sha256", ""),
        ("sha256", "g" * 64),
        ("sha256", None),
        ("size", 0),
        ("size", -1),
        ("size", 2**63 - 1),
        ("size", (64 << 20) + 1),
        ("size", True),
        ("size", "100"),
        ("arch", "sm_9"),
        ("arch", "90a"),
        ("arch", "sm_90b"),
        ("param_bytes", 1408),
        ("param_bytes", 0),
        ("symbol", ""),
        ("symbol", "a b"),
        ("symbol", "x" * 1024),
        ("family", "unknown"),
        ("family", None),
        ("family", ["hopper"]),
    ],
)
def test_hostile_field(field: str, value: object) -> None:
    """T1.07, fault 13: empty or non-hex digests, sizes out of range, drifted param_bytes: line and field are named."""
    with pytest.raises(LockFileError, match=rf"line 9, field artifacts\.1\.{field}"):
        LockFile.parse(with_artifact(**{field: value}))


def test_unknown_and_missing_fields() -> None:
    with pytest.raises(LockFileError, match=r"line 9, field artifacts\.1\.extra: is not a field"):
        LockFile.parse(with_artifact(extra=1))
    text = with_artifact().replace(', "symbol": "_Z1bv"', "")
    with pytest.raises(LockFileError, match=r"line 9, field artifacts\.1\.symbol: is missing"):
        LockFile.parse(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=2), "field schema: this version reads schema 1; found: 2"),
        (lambda d: d.update(schema=True), "field schema"),
        (lambda d: d.update(extra=1), "field extra: is not a field"),
        (lambda d: d.pop("artifacts"), "field artifacts: is missing"),
        (lambda d: d.update(artifacts={}), "field artifacts: is not a list"),
        (lambda d: d.update(artifacts=[1]), r"field artifacts\.0: is not an object"),
        (lambda d: d.update(families=[]), "field families: is not an object"),
        (lambda d: d["families"].update(hopper=3), r"field families\.hopper: is not an object"),
        (lambda d: d["families"]["hopper"].update(param_bytes=-4), r"field families\.hopper\.param_bytes"),
        (lambda d: d["families"]["hopper"].update(pack="../evil.zip"), r"field families\.hopper\.pack"),
        (lambda d: d["families"]["hopper"].update(more=1), r"field families\.hopper\.more"),
        (lambda d: d["families"]["hopper"].update(repositories=["http://a/b"]), r"families\.hopper\.repositories"),
        (lambda d: d["families"]["hopper"].update(repositories=["https://u:p@a/b"]), r"families\.hopper\.repositories"),
        (lambda d: d["families"]["hopper"].update(repositories=["file:///etc"]), r"families\.hopper\.repositories"),
        (lambda d: d["families"]["hopper"]["table"].update(file="/etc/passwd"), r"families\.hopper\.table\.file"),
        (lambda d: d["families"]["hopper"]["table"].update(sha256="0"), r"families\.hopper\.table\.sha256"),
        (lambda d: d["families"]["hopper"]["toolchain"].update(flags="-O3"), r"families\.hopper\.toolchain\.flags"),
        (lambda d: d["families"].update({"../x": d["families"]["hopper"]}), r"field families\.\.\./x"),
    ],
)
def test_hostile_document(change: Any, message: str) -> None:
    with pytest.raises(LockFileError, match=message):
        LockFile.parse(changed(change))


def test_duplicates() -> None:
    text = LOCK.dump()
    line = next(line for line in text.splitlines() if "hopper/sub/b.cubin" in line)
    other_digest = line.replace("b" * 64, "d" * 64)
    with pytest.raises(LockFileError, match=r"line 10, field artifacts\.2\.path: stands twice"):
        LockFile.parse(text.replace(line, f"{line}\n{other_digest}"))
    with pytest.raises(LockFileError, match=r"field size: the key stands twice"):
        LockFile.parse(text.replace('"size": 1000', '"size": 1000, "size": 1001'))


@pytest.mark.parametrize(
    ("number", "message"),
    [("NaN", "NaN is not"), ("Infinity", "Infinity"), ("1.0", "1.0"), ("1e3", "1e3"), ("9" * 5000, "too long")],
)
def test_odd_numbers(number: str, message: str) -> None:
    with pytest.raises(LockFileError, match=message):
        LockFile.parse(LOCK.dump().replace('"size": 1000', f'"size": {number}'))


@pytest.mark.parametrize("text", ["", "null", "[]", "{", '"x', "[" * 200_000, '{"a":' * 200_000, "\ud800", "{}\0"])
def test_not_a_lock(text: str) -> None:
    """Fault 13: depth bombs and bytes that are no JSON."""
    started = time.thread_time()
    with pytest.raises(LockFileError):
        LockFile.parse(text)
    assert time.thread_time() - started < 0.3


def test_syntax_error_names_its_line() -> None:
    with pytest.raises(LockFileError, match="line 9: not JSON"):
        LockFile.parse(LOCK.dump().replace('"_Z1bv"', "_Z1bv"))


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    """A 1 GiB file (sparse) costs neither time nor memory."""
    path = tmp_path / "cubins.lock"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(LockFileError, match="longer than"):
        LockFile.read(path)


def test_too_many_artifacts() -> None:
    limits = dataclasses.replace(LIMITS, artifacts=2)
    with pytest.raises(LockFileError, match="more than 2 entries"):
        LockFile.parse(LOCK.dump(), limits)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(LockFileError, match="No such file"):
        LockFile.read(tmp_path / "absent")
    with pytest.raises(LockFileError, match="directory"):
        LockFile.read(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(LockFileError, match="byte 0 is not UTF-8"):
        LockFile.read(tmp_path / "latin")


def test_fast_at_23000_artifacts() -> None:
    """As many as FlashInfer publishes in all; 0.13 s on two slow cores."""
    name = "k" * 150
    artifacts = tuple(
        Artifact("big", f"big/{name}{i:05}.cubin", hashlib.sha256(b"%d" % i).hexdigest(), i + 1, "sm_100f", 1280, name)
        for i in range(23_000)
    )
    lock = LockFile({"big": Family(1280, "1")}, artifacts)
    text = lock.dump()
    started = time.thread_time()
    parsed = LockFile.parse(text)
    assert time.thread_time() - started < 1.0
    assert parsed == lock
    bad = text.replace('"sm_100f"', '"sm_100x"').replace('"sm_100x"', '"sm_100f"', 22_999)
    with pytest.raises(LockFileError, match=r"field artifacts\.22999\.arch"):
        LockFile.parse(bad)


def test_generated_layout_is_read_fast() -> None:
    """What the first call of a process pays: one pattern a line, not a call for each field."""
    text = (Path(__file__).parents[2] / "cubins.lock").read_text()

    def best(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(5):
            started = time.thread_time()
            work()
            seconds.append(time.thread_time() - started)
        return min(seconds)

    assert best(lambda: LockFile.parse(text)) < 0.75 * best(lambda: slowly(text))


def slowly(text: str) -> LockFile | None:
    """What the field-by-field check makes of `text`; None if it refuses."""
    with contextlib.suppress(ValueError, RecursionError, lock_parser._Bad):
        return lock_parser._lock(lock_parser._document(text), LIMITS)
    return None


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_fast_way_takes_nothing_that_the_slow_way_refuses(data: st.DataObject) -> None:
    text = LOCK.dump()
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(text)))
        part = data.draw(st.sampled_from(text.splitlines(keepends=True)) | st.text(max_size=3))
        text = text[:at] + part + text[at + data.draw(st.integers(0, 80)) :]
    fast = lock_parser._generated(text, LIMITS)
    assert fast is None or fast == slowly(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "hopper/a.cubin"),
        ("path", "other/b.cubin"),
        ("path", "hopper/" + "/".join(["x" * 100] * 6)),
        ("size", 0),
        ("size", (64 << 20) + 1),
        ("size", "1"),
        ("size", 1.0),
        ("param_bytes", 1408),
        ("family", "unknown"),
        ("family", "other"),
        ("sha256", "A" * 64),
        ("arch", "sm_9"),
        ("symbol", "a\\u0062"),
        ("extra", 1),
    ],
)
def test_fast_way_checks_every_field(field: str, value: object) -> None:
    assert lock_parser._generated(LOCK.dump(), LIMITS) == LOCK
    text = with_artifact(**{field: value})
    assert lock_parser._generated(text, LIMITS) is None
    assert slowly(text) is None


def test_repository_with_a_password_is_not_shown() -> None:
    with pytest.raises(LockFileError) as caught:
        LockFile.parse(changed(lambda d: d["families"]["hopper"].update(repositories=["https://u:se/cret@a/b"])))
    assert "cret" not in str(caught.value) and "se/" not in str(caught.value)


def test_installed_lock_is_canonical() -> None:
    """The committed file is what `dump` writes: nobody edited it by hand."""
    text = (Path(__file__).parents[2] / "cubins.lock").read_text()
    assert LockFile.parse(text).dump() == text
    assert installed_lock() == LockFile.parse(text)


segments = st.from_regex(r"[A-Za-z0-9_+=-][A-Za-z0-9_+=.-]{0,20}", fullmatch=True)
artifacts_of_f = st.builds(
    Artifact,
    family=st.just("f"),
    path=st.lists(segments, min_size=1, max_size=4).map(lambda parts: "/".join(["f", *parts])),
    sha256=st.binary(min_size=32, max_size=32).map(bytes.hex),
    size=st.integers(1, LIMITS.cubin_bytes),
    arch=st.sampled_from(["sm_80", "sm_90a", "sm_100f", "sm_103a", "sm_121a"]),
    param_bytes=st.just(1280),
    symbol=st.from_regex(r"[A-Za-z_$][A-Za-z0-9_$]{0,30}", fullmatch=True),
)


@settings(deadline=None)
@given(st.lists(artifacts_of_f, unique_by=lambda artifact: artifact.path, max_size=8))
def test_any_lock_survives_the_round_trip(artifacts: list[Artifact]) -> None:
    ordered = tuple(sorted(artifacts, key=lambda artifact: artifact.path))
    lock = LockFile({"f": Family(1280, "1")}, ordered)
    assert LockFile.parse(lock.dump()) == lock


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_any_damage_is_a_typed_error(data: st.DataObject) -> None:
    """One place of a sound lock replaced by anything, or characters replaced: a lock, or LockFileError."""
    if data.draw(st.booleans()):
        document = json.loads(LOCK.dump())
        place, key = document, data.draw(st.sampled_from(sorted(document)))
        while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
            place = place[key]
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = data.draw(st.sampled_from(list(keys)))
        place[key] = data.draw(json_values)
        text = json.dumps(document)
    else:
        text = LOCK.dump()
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.text(max_size=4)) + text[at + data.draw(st.integers(0, 4)) :]
    try:
        assert isinstance(LockFile.parse(text), LockFile)
    except LockFileError as error:
        assert len(str(error)) < 2000


def test_synthetic_locks_are_locks() -> None:
    lock = make_lock(make_cubins(3))
    assert LockFile.parse(lock.dump()) == lock
