"""The trtllm-gen manifest and lock against the golden table, and the tool that makes them from NVIDIA's files."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import golden
import pytest
from synthetic import make_cubin
from trtllm_gen_rows import COLUMNS, ENUMS

from fmha_dispatch import _core
from fmha_dispatch.cubin import verify
from fmha_dispatch.errors import IntegrityError
from fmha_dispatch.lockfile import Artifact, LockFile, installed_lock
from fmha_dispatch.manifest import load_manifest
from fmha_dispatch.sources import DATA

ROOT = Path(__file__).parents[2]
NUM_KERNELS = 13452
COMMIT = "158f6fa11ef139a098cfddcdddce73ca99d164ad"

# Golden name -> column: by name where the column is a dtype, by number where it is another enum, else as it is.
NAMED = {name: column for name, column in COLUMNS.items() if name.startswith("dtype")}
NUMBERED = {name: column for name, (column, _) in ENUMS.items()}
SAME = {name: column for name, column in COLUMNS.items() if name not in NAMED}


@pytest.fixture(scope="module")
def tools() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("make_lock", ROOT / "tools" / "make_lock.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_lock"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "tools"))
    del sys.modules["make_lock"]


def as_golden(row: _core.Row, artifact: Artifact) -> dict[str, Any]:
    found = {name: getattr(row, column) for name, column in SAME.items()}
    found |= {name: getattr(row, column).value for name, column in NUMBERED.items()}
    found |= {name: getattr(row, column).name for name, column in NAMED.items()}
    return found | {
        "sha256": artifact.sha256,
        "cubinBytes": artifact.size,
        "kernelParamBytes": artifact.param_bytes,
        "cubin": artifact.symbol + ".cubin",
    }


def test_manifest_and_lock_equal_the_golden_table_row_by_row() -> None:
    manifest, lock = load_manifest("trtllm-gen"), installed_lock()
    assert len(manifest) == len(lock.of_family("trtllm-gen")) == NUM_KERNELS
    known = {*SAME, *NUMBERED, *NAMED, "sha256"}
    for expected in golden.kernels():
        row = manifest[expected["idx"]]
        artifact = lock.by_path[row.cubin]
        found = as_golden(row, artifact)
        elf = expected["elf"]
        assert found == {name: expected[name] for name in known} | {
            "cubinBytes": elf["cubinBytes"],
            "kernelParamBytes": elf["kernelParamBytes"],
            "cubin": expected["funcName"] + ".cubin",
        }
        assert row.name == row.symbol == artifact.symbol
        assert artifact.arch == {100: "sm_100a", 103: "sm_103a", 10100: "sm_100f"}[row.sm]
    if golden.is_complete:
        assert [row["idx"] for row in golden.kernels()] == list(range(NUM_KERNELS))


def test_every_row_has_its_artifact_and_every_artifact_a_row() -> None:
    manifest, lock = load_manifest("trtllm-gen"), installed_lock()
    named = [manifest[i].cubin for i in range(len(manifest))]
    assert len(set(named)) == NUM_KERNELS
    assert set(named) == {artifact.path for artifact in lock.of_family("trtllm-gen")}


def test_manifest_is_small_and_opens_fast() -> None:
    data = (DATA / "trtllm_gen.manifest").read_bytes()
    assert len(data) <= 2_000_000
    best = 1.0
    for _ in range(10):
        start = time.perf_counter()
        _core.Manifest(data)
        best = min(best, time.perf_counter() - start)
    assert best <= 0.005


def test_lock_names_the_repository_and_the_artifact_version() -> None:
    (url,) = installed_lock().families["trtllm-gen"].repositories
    assert url.startswith("https://") and url.endswith(f"/{COMMIT}/fmha/trtllm-gen")


HEADER = """#pragma once
struct TllmGenFmhaKernelMetaInfo
{
    Data_type mDataTypeQ;
    Data_type mDataTypeKv;
    Data_type mDataTypeK;
    Data_type mDataTypeV;
    Data_type mDataTypeO;
    int mTileSizeQ;
    int mTileSizeKv;
    int mStepQ;
    int mStepKv;
    int mHeadDimPerCtaV;
    int mHeadDimQk;
    int mHeadDimV;
    int mSM;
    const unsigned char* mCubin;
    unsigned int mCubinSize;
    const char* mFuncName;
    int mSharedMemBytes;
    int mThreadsPerCTA;
    int mQkvLayout;
    int mNumTokensPerPage;
    int mMaskType;
    int mKernelType;
    int mTileScheduler;
    int mMultiCtasKvMode;
    int mNumEltsPerSageAttnBlkQ;
    int mNumEltsPerSageAttnBlkK;
    int mNumEltsPerSageAttnBlkP;
    int mNumEltsPerSageAttnBlkV;
    bool mGroupsHeadsQ;
    bool mGroupsTokensHeadsQ;
    bool mReuseSmemKForV;
    bool m2CtaMma;
    int mSparseAttn;
    bool mSkipsSoftmaxWhenPossible;
    bool mReserved1;
    bool mReserved2;
    const char* sha256;
};

static const TllmGenFmhaKernelMetaInfo sTllmGenFmhaKernelMetaInfos[] = {
%s
};
"""
ELEMENT = (
    "{{ DATA_TYPE_E4M3, DATA_TYPE_UNKNOWN, DATA_TYPE_E4M3, DATA_TYPE_E4M3, DATA_TYPE_BF16, 8, 128, 8, 256, 128, 128, "
    '128, kSM_100f, nullptr, 0, "{symbol}", 99328, 512, 2, 128, 1, 2, 0, 3, 0, 0, 0, 0, true, true, false, false, 0, '
    'true, false, false, "{sha256}"}},'
)


def element(symbol: str = "kernelPaged", sha256: str = "a" * 64) -> str:
    return ELEMENT.format(symbol=symbol, sha256=sha256)


def test_a_header_row_becomes_columns(tools: ModuleType) -> None:
    (kernel,) = tools.read_kernels(HEADER % element())
    assert kernel.sha256 == "a" * 64
    assert kernel.columns["dtype_o"] == "BF16" and kernel.columns["sm"] == 10100
    assert kernel.columns["multi_ctas_kv_mode"] == "CgaSmemReduction"
    assert kernel.columns["skips_softmax"] is True and kernel.columns["uses_2cta_mma"] is False
    assert kernel.columns["dynamic_page"] is True
    (fixed,) = tools.read_kernels(HEADER % element("kernelP128"))
    assert fixed.columns["dynamic_page"] is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEADER % element().replace("kSM_100f", "kSM_107"), "line 44: mSM is kSM_107"),
        (HEADER % element().replace("128, 1, 2, 0", "128, 1, 9, 0"), "mKernelType is 9"),
        (HEADER % element().replace("false, false, 0", "false, maybe, 0"), "m2CtaMma is maybe"),
        (HEADER % element().replace("nullptr, 0", "data, 9"), "mCubin is data, expected nullptr"),
        (HEADER % element(sha256="abc"), "sha256 is 'abc'"),
        (HEADER % element().replace("8, 128, 8,", "8, 128,"), "36 values for 37 fields"),
        (HEADER % "int x;", "no array element"),
        ((HEADER % element()).rpartition("};")[0], "cut short"),
        ((HEADER % element()).replace("    int mStepQ;\n", ""), r"missing fields \['mStepQ'\]"),
        ((HEADER % element()).replace("bool mReserved1", "bool mUsesSpcompress"), r"new fields \['mUsesSpcompress'\]"),
        ("#pragma once\n", "no line like"),
    ],
)
def test_a_header_that_says_more_or_less_is_refused(tools: ModuleType, text: str, words: str) -> None:
    with pytest.raises(tools.HeaderError, match=words):
        tools.read_kernels(text)


def artifact_folder(root: Path, cubins: dict[str, bytes], header: str | None = None) -> Path:
    folder = root / "cubins" / COMMIT / "fmha" / "trtllm-gen"
    (folder / "include").mkdir(parents=True)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in cubins.items()}
    rows = "\n".join(element(name.removesuffix(".cubin"), digest) for name, digest in digests.items())
    text = (header or HEADER % rows).encode()
    (folder / "include" / "flashInferMetaInfo.h").write_bytes(text)
    digests["include/flashInferMetaInfo.h"] = hashlib.sha256(text).hexdigest()
    for name, data in cubins.items():
        (folder / name).write_bytes(data)
    (folder / "checksums.txt").write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    return root


def refusal(tools: ModuleType, root: Path) -> str:
    with pytest.raises(tools.Failure) as failure:
        source = tools.open_source(root)
        tools.import_artifact(source, *tools.find_artifact(source, None))
    return str(failure.value)


def test_bytes_digests_and_lists_must_agree(tools: ModuleType, tmp_path: Path) -> None:
    one = {"kernelA.cubin": b"not an ELF file"}
    assert "not a sound cubin" in refusal(tools, artifact_folder(tmp_path / "elf", one))
    root = artifact_folder(tmp_path / "bytes", one)
    next(root.rglob("*.cubin")).write_bytes(b"other bytes")
    assert "checksums.txt says" in refusal(tools, root)
    root = artifact_folder(tmp_path / "gone", one)
    next(root.rglob("*.cubin")).unlink()
    assert "not in the source" in refusal(tools, root)
    root = artifact_folder(tmp_path / "header", one, HEADER % element("kernelA", "b" * 64))
    assert "in the header" in refusal(tools, root)
    root = artifact_folder(tmp_path / "more", one, HEADER % (element("kernelA") + "\n" + element("kernelB")))
    assert "2 kernels in the header, 1 cubins in checksums.txt" in refusal(tools, root)
    root = artifact_folder(tmp_path / "line", one)
    next(root.rglob("checksums.txt")).write_text("0123  kernelA.cubin\n")
    assert "line 1 is no new digest" in refusal(tools, root)
    assert "found none" in refusal(tools, tmp_path / "gone" / "cubins" / COMMIT)
    assert "neither a folder nor a wheel" in refusal(tools, tmp_path / "absent.whl")


def test_elf_facts_must_be_those_of_the_header(tools: ModuleType, tmp_path: Path) -> None:
    def root(name: str, **facts: Any) -> Path:
        return artifact_folder(tmp_path / name, {"kernelA.cubin": make_cubin(**facts)})

    found = refusal(tools, root("arch", symbol="kernelA", arch="sm_103a"))
    assert "kernelA.cubin is for sm_103a, the header says 10100" in found
    assert "kernelA.cubin holds kernelB" in refusal(tools, root("symbol", symbol="kernelB", arch="sm_100f"))
    one = make_cubin("kernelA", arch="sm_100f")
    other = make_cubin("kernelB", arch="sm_100f", param_bytes=1408)
    mixed = artifact_folder(tmp_path / "size", {"kernelA.cubin": one, "kernelB.cubin": other})
    assert "disagree about the size of KernelParams: [1280, 1408]" in refusal(tools, mixed)


@pytest.mark.parametrize("packed", [False, True])
def test_folder_and_wheel_give_the_same(tools: ModuleType, tmp_path: Path, packed: bool) -> None:
    cubins = {f"{name}.cubin": make_cubin(name, arch="sm_100f") for name in ("kernelA", "kernelB")}
    source = artifact_folder(tmp_path / "package", cubins)
    if packed:
        source = Path(shutil.make_archive(str(tmp_path / "package"), "zip", source))
    opened = tools.open_source(source)
    imported = tools.import_artifact(opened, *tools.find_artifact(opened, COMMIT[:8]))
    assert (imported.folder, imported.param_bytes) == (f"{COMMIT}/fmha/trtllm-gen", 1280)
    assert [artifact.path for artifact in imported.artifacts] == [
        "trtllm-gen/kernelA.cubin",
        "trtllm-gen/kernelB.cubin",
    ]
    for artifact, row in zip(imported.artifacts, imported.rows, strict=True):
        assert verify(cubins[f"{artifact.symbol}.cubin"], artifact).arch == artifact.arch == "sm_100f"
        assert (row["cubin"], row["name"], row["symbol"]) == (artifact.path, artifact.symbol, artifact.symbol)


def test_the_family_is_replaced_and_others_stay(tools: ModuleType) -> None:
    lock = installed_lock()
    artifacts = [lock.of_family("trtllm-gen")[0]]
    imported = tools.Imported("f" * 40 + "/fmha/trtllm-gen", 1408, [], artifacts)
    after = tools.updated_lock(lock, imported, "0.6.18", b"table")
    assert after.families["trtllm-gen"].param_bytes == 1408
    assert after.families["trtllm-gen"].repositories[0].endswith("/" + "f" * 40 + "/fmha/trtllm-gen")
    assert after.of_family("trtllm-gen") == tuple(artifacts)
    for name in lock.families.keys() - {"trtllm-gen"}:
        assert after.families[name] == lock.families[name] and after.of_family(name) == lock.of_family(name)


def test_check_tells_a_stale_lock(
    tools: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = tools.Imported(f"{COMMIT}/fmha/trtllm-gen", 1280, [], [installed_lock().of_family("trtllm-gen")[0]])
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    monkeypatch.setattr(tools, "LOCK", tmp_path / "cubins.lock")
    monkeypatch.setattr(tools, "MANIFEST", tmp_path / "trtllm_gen.manifest")
    monkeypatch.setattr(tools, "import_artifact", lambda source, prefix, folder: imported)
    root = str(artifact_folder(tmp_path / "source", {}))
    command = [root, "--layout", "0.6.13"]
    assert tools.main([*command, "--check"]) == 4
    assert "trtllm_gen.manifest differs" in capsys.readouterr().err
    assert tools.main(command) == 0
    assert tools.main([*command, "--check"]) == 0
    assert LockFile.read(tmp_path / "cubins.lock").families.keys() == {"trtllm-gen"}
    assert tools.main([root, "--layout", "0.6.18", "--check"]) == 4
    assert tools.main([root, "--layout", "0.6.13", "--commit", "0000"]) == 1


def test_the_lock_pins_the_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fmha_dispatch import manifest

    (tmp_path / "trtllm_gen.manifest").write_bytes((DATA / "trtllm_gen.manifest").read_bytes()[:-1] + b"\1")
    monkeypatch.setattr(manifest, "DATA", tmp_path)
    with pytest.raises(IntegrityError, match=r"not the one of cubins\.lock"):
        manifest.load_manifest.__wrapped__("trtllm-gen")
