"""The command: exit codes, JSON, complete lists, light start-up."""

from __future__ import annotations

import functools
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runner import run, run_json
from fault_server import FaultServer, reply
from synthetic import make_cubins, make_lock, write_folder, write_pack

from fmha_dispatch import cli
from fmha_dispatch.errors import ExitCode, StoreError
from fmha_dispatch.lockfile import installed_lock
from fmha_dispatch.store import Store

CUBINS = make_cubins(4, family="f")
PATHS = sorted(CUBINS)

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def lock(tmp_path: Path) -> str:
    path = tmp_path / "cubins.lock"
    path.write_text(make_lock(CUBINS).dump())
    return str(path)


def test_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in cli.COMMANDS:
        assert command in out
    for number in ExitCode:
        assert f" {int(number)} " in out
    assert "FMHA_DISPATCH_CACHE_DIR" in out


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_each_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert "--json" in out and "exit codes" in out


def test_verify_of_a_complete_folder(capsys: pytest.CaptureFixture[str], lock: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "d", CUBINS)
    code, report = run_json(capsys, "verify", "--lock", lock, "--folder", str(folder), "--layer", "folder")
    assert code == ExitCode.OK
    assert (report["artifacts"], report["good_copies"], report["damaged"], report["missing"]) == (4, 4, [], [])


def test_verify_names_every_missing_file(capsys: pytest.CaptureFixture[str], lock: str, tmp_path: Path) -> None:
    """T1.05: completeness is judged by the lock."""
    folder = write_folder(tmp_path / "d", {PATHS[1]: CUBINS[PATHS[1]]})
    code, out, _ = run(capsys, "verify", "--lock", lock, "--folder", str(folder))
    assert code == ExitCode.MISSING_OFFLINE
    assert [line for line in out.splitlines() if line.startswith("missing: ")] == [
        f"missing: {path}" for path in PATHS if path != PATHS[1]
    ]


def test_verify_names_every_damaged_file(capsys: pytest.CaptureFixture[str], lock: str, tmp_path: Path) -> None:
    """Damage outranks absence; every layer is read, not only the first that answers."""
    good = write_folder(tmp_path / "good", CUBINS)
    bad = dict(CUBINS)
    bad[PATHS[0]] = bad[PATHS[0]][:-1] + b"\xff"
    bad[PATHS[3]] = b""
    folder = write_folder(tmp_path / "bad", bad)
    arguments = ["verify", "--lock", lock, "--folder", str(folder), "--mirror", f"file://{good}"]
    code, report = run_json(capsys, *arguments)
    assert code == ExitCode.INTEGRITY
    assert [entry["path"] for entry in report["damaged"]] == [PATHS[0], PATHS[3]]
    assert (report["missing"], report["good_copies"]) == ([], 6)


def test_verify_the_installed_pack(capsys: pytest.CaptureFixture[str]) -> None:
    """The cubins that come with the package are those of its lock, byte for byte, and so are the manifest tables."""
    code, report = run_json(capsys, "verify", "--family", "hopper", "--layer", "pack")
    assert code == ExitCode.OK, report["damaged"] + report["missing"]
    assert report["good_copies"] == report["artifacts"] > 0


def test_verify_passes_over_a_family_that_was_never_brought(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A Hopper node has none of NVIDIA's cubins; one of them here, even damaged, and all of them count."""
    code, report = run_json(capsys, "verify", "--cache-dir", str(tmp_path / "cache"))
    assert (code, report["missing"]) == (ExitCode.OK, [])
    assert report["not_brought"]["trtllm-gen"] > 13_000
    artifact = next(artifact for artifact in installed_lock().artifacts if artifact.family == "trtllm-gen")
    write_folder(tmp_path / "folder", {artifact.path: b"not a cubin"})
    code, report = run_json(
        capsys, "verify", "--cache-dir", str(tmp_path / "cache"), "--folder", str(tmp_path / "folder")
    )
    assert code == ExitCode.INTEGRITY
    assert "trtllm-gen" not in report["not_brought"] and len(report["missing"]) > 13_000


def test_explain_takes_what_is_said_over_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "explain", "--model", "gpt-oss", "--head-dim", "128")
    assert code == ExitCode.OK and "_d128_" in report["kernel"]
    code, report = run_json(capsys, "explain", "--model", "gpt-oss", "--head-dim", "96")
    assert code == ExitCode.USER and "head_dim_qk=96" in report["reason"]
    code, _, _ = run(capsys, "explain", "--gpu", "b200", "--sm", "103")
    assert code == ExitCode.USER


def test_fetch_and_verify_again(capsys: pytest.CaptureFixture[str], lock: str, tmp_path: Path) -> None:
    """T1.04: fetch to a folder, then everything resolves offline from it."""
    with FaultServer(CUBINS).running() as server:
        dest = str(tmp_path / "dest")
        code, report = run_json(capsys, "fetch", "--lock", lock, "--mirror", server.url, "--dest", dest)
        assert (code, report["available"], report["errors"]) == (ExitCode.OK, 4, [])
    code, report = run_json(capsys, "verify", "--lock", lock, "--folder", dest, "--layer", "folder", "--offline")
    assert (code, report["good_copies"]) == (ExitCode.OK, 4)
    (tmp_path / "dest" / PATHS[2]).unlink()
    code, report = run_json(capsys, "verify", "--lock", lock, "--folder", dest, "--layer", "folder")
    assert (code, report["missing"]) == (ExitCode.MISSING_OFFLINE, [PATHS[2]])


def test_fetch_lists_what_failed(capsys: pytest.CaptureFixture[str], lock: str) -> None:
    with FaultServer(CUBINS).running() as server:
        server.scripts[PATHS[1]] = [reply(404)]
        code, out, _ = run(capsys, "fetch", "--lock", lock, "--mirror", server.url)
    assert code == ExitCode.NETWORK
    assert f"{PATHS[1]}: " in out and "HTTP 404" in out
    assert out.splitlines()[-1].startswith("3 of 4 cubins available")


def test_fetch_offline(capsys: pytest.CaptureFixture[str], lock: str) -> None:
    code, report = run_json(capsys, "fetch", "--lock", lock, "--mirror", "http://127.0.0.1:9", "--offline")
    assert code == ExitCode.MISSING_OFFLINE
    assert report["error"]["missing"] == PATHS
    assert "fmha-dispatch fetch --family f" in report["error"]["fix"]


def test_fetch_chooses(capsys: pytest.CaptureFixture[str], lock: str) -> None:
    """T1.17: exactly the rows that were asked for."""
    with FaultServer(CUBINS).running() as server:
        code, report = run_json(capsys, "fetch", "--lock", lock, "--mirror", server.url, "--match", "k000[13]")
        assert (code, report["requested"]) == (ExitCode.OK, 2)
        assert set(server.hits) == {PATHS[1], PATHS[3]}


def test_bad_lock(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("{")
    code, report = run_json(capsys, "verify", "--lock", str(tmp_path / "x.lock"))
    assert code == ExitCode.LOCK
    assert report["error"]["kind"] == "LockFileError"


def test_disk_error(capsys: pytest.CaptureFixture[str], lock: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with FaultServer(CUBINS).running() as server:
        arguments = ["fetch", "--lock", lock, "--mirror", server.url, "--cache-dir", str(tmp_path / "file")]
        code, report = run_json(capsys, *arguments)
    assert code == ExitCode.DISK
    assert report["error"]["kind"] == StoreError.__name__


def test_status(capsys: pytest.CaptureFixture[str], lock: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "d", {PATHS[0]: CUBINS[PATHS[0]]})
    mirror = "https://user:secret@host.example/x"
    code, report = run_json(capsys, "status", "--lock", lock, "--folder", str(folder), "--mirror", mirror)
    assert code == ExitCode.OK
    family = report["families"]["f"]
    assert (family["artifacts"], family["missing"]) == (4, PATHS[1:])
    assert family["present"] == {f"folder {folder}": 1}
    assert report["versions"]["python"].startswith("3.")
    assert "secret" not in json.dumps(report)
    code, out, _ = run(capsys, "status", "--lock", lock)
    assert code == ExitCode.OK
    assert "family f: 0 of 4 cubins present" in out


def damaged_pack(tmp_path: Path, damage: str) -> tuple[str, Path]:
    """A lock whose family has a pack, and the folder with that pack, damaged."""
    lock = tmp_path / "packed.lock"
    lock.write_text(make_lock(CUBINS, pack="f.zip").dump())
    pack = write_pack(tmp_path / "data" / "f.zip", CUBINS)
    sound = bytearray(pack.read_bytes())
    entry = sound.index(b"PK\x01\x02")
    if damage == "version":
        sound[entry + 6] = 255  # zipfile raises NotImplementedError
    elif damage == "name":
        sound[entry + 8 + 1] |= 0x08  # the name is UTF-8 ...
        sound[entry + 46] = 0xFF  # ... but is not
    else:
        del sound[-30:]
    pack.write_bytes(sound)
    return str(lock), tmp_path / "data"


@pytest.mark.parametrize("damage", ["version", "name", "end"])
def test_status_of_a_damaged_pack(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    """Damage is part of the status, not a bug of the command; other layers still count."""
    lock, data = damaged_pack(tmp_path, damage)
    monkeypatch.setattr("fmha_dispatch.store_commands.Store", functools.partial(Store, data=data))
    mirror = write_folder(tmp_path / "mirror", {PATHS[1]: CUBINS[PATHS[1]]})
    arguments = ["status", "--lock", lock, "--mirror", f"file://{mirror}"]
    code, report = run_json(capsys, *arguments)
    assert code == ExitCode.OK
    faults = {layer["name"]: layer["fault"] for layer in report["layers"]}
    assert "pack f.zip is damaged: " in faults.pop("pack f.zip")
    assert set(faults.values()) == {None}
    family = report["families"]["f"]
    assert (family["present"], len(family["missing"])) == ({f"mirror {mirror}": 1}, 3)
    code, out, _ = run(capsys, *arguments)
    assert code == ExitCode.OK
    assert "layer: pack f.zip is damaged: " in out
    code, report = run_json(capsys, "verify", "--lock", lock, "--layer", "pack")
    assert code == ExitCode.INTEGRITY
    assert [entry["path"] for entry in report["damaged"]] == PATHS


@pytest.mark.parametrize("home", [None, "/", "/nonexistent"])
def test_status_without_a_home(capsys: pytest.CaptureFixture[str], monkeypatch: Any, home: str | None) -> None:
    """T1.14."""
    if home is None:
        monkeypatch.delenv("HOME")
    else:
        monkeypatch.setenv("HOME", home)
    assert run(capsys, "status")[0] == ExitCode.OK


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fmha_dispatch.store_commands.status.open_store", interrupt)
    assert run(capsys, "status")[:2] == (ExitCode.INTERRUPTED, "")
    code, report = run_json(capsys, "status")
    assert (code, report["error"]["message"]) == (ExitCode.INTERRUPTED, "interrupted")


def test_bug_is_reported_shortly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise TypeError("surprise")

    monkeypatch.setattr("fmha_dispatch.store_commands.status.open_store", broken)
    code, out, err = run(capsys, "status", "--json")
    assert code == ExitCode.BUG
    assert json.loads(out)["error"]["where"].startswith("test_cli.py:")
    assert "TypeError: surprise" in err and "Traceback" not in err


@pytest.mark.parametrize("command", ["verify", "status", "fetch"])
def test_closed_pipe_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch, lock: str, command: str) -> None:
    """`fmha-dispatch verify | head -1` is no bug, and no success either."""

    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            pass

        def fileno(self) -> int:
            return os.open(os.devnull, os.O_WRONLY)

    monkeypatch.setattr(sys, "stdout", Closed())
    want = {"verify": ExitCode.MISSING_OFFLINE, "status": ExitCode.OK, "fetch": ExitCode.MISSING_OFFLINE}
    assert cli.main([command, "--lock", lock]) == want[command]


def test_real_pipe(lock: str) -> None:
    script = (
        f"{sys.executable} -m fmha_dispatch.cli verify --lock {lock} | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(int(ExitCode.MISSING_OFFLINE))
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def imported_by(code: str) -> set[str]:
    """Modules in a fresh interpreter after `code`, less those of a bare one."""
    show = "import sys, json; print(json.dumps(sorted(sys.modules)))"
    both = [
        subprocess.run([sys.executable, "-c", f"{text}\n{show}"], capture_output=True, text=True, check=True).stdout
        for text in ("", code)
    ]
    bare, loaded = (set(json.loads(text.splitlines()[-1])) for text in both)
    return loaded - bare


def heavy(modules: set[str]) -> set[str]:
    roots = {name.partition(".")[0] for name in modules}
    return roots & {"torch", "requests", "urllib3", "filelock", "cuda", "numpy", "nanobind"}


def test_import_is_light() -> None:
    """Neither torch, requests nor CUDA; 30 ms over a bare interpreter, measured against the interpreter itself."""
    modules = imported_by("import fmha_dispatch")
    assert heavy(modules) == set()
    assert len(modules) < 20

    def seconds(code: str) -> float:
        best = 9.0
        for _ in range(7):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            best = min(best, time.perf_counter() - started)
        return best

    assert seconds("import fmha_dispatch") - seconds("pass") < 0.030


def test_status_is_light(lock: str) -> None:
    code = f"from fmha_dispatch import cli; assert cli.main(['status', '--lock', {lock!r}]) == 0"
    assert heavy(imported_by(code)) <= {"cuda", "nanobind"}  # with a driver, its version is asked for


def test_help_imports_no_command() -> None:
    modules = imported_by(
        "import contextlib\nfrom fmha_dispatch import cli\nwith contextlib.suppress(SystemExit): cli.main(['-h'])"
    )
    assert not {name for name in modules if name.startswith("fmha_dispatch.")} - {
        "fmha_dispatch.cli",
        "fmha_dispatch.console",
        "fmha_dispatch.errors",
        "fmha_dispatch.settings",
    }


def test_library_leaves_logging_alone() -> None:
    """T1.19: no handler, no level, no basicConfig from the library."""
    code = (
        "import logging, fmha_dispatch.store, fmha_dispatch.fetch, fmha_dispatch.cli\n"
        "logger = logging.getLogger('fmha_dispatch')\n"
        "assert not logger.handlers and not logging.getLogger().handlers and logger.level == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
