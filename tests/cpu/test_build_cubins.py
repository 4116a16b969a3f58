"""tools/build_cubins.py and tools/check_sass.py without a compiler: table, pack, digests against the lock, listings."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from fmha_dispatch import _core
from fmha_dispatch._core import Manifest
from fmha_dispatch.lockfile import Artifact, Family, LockFile, Toolchain

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


table = load("cubin_variants")
tool = load("build_cubins")
sass = load("check_sass")
BY_SYMBOL = {variant.symbol: variant for variant in table.variants()}
DECODE = {symbol: variant for symbol, variant in BY_SYMBOL.items() if variant.family is table.HOPPER}


def test_table_covers_dtypes_head_dims_tiles():
    assert len(DECODE) == 30
    assert list(BY_SYMBOL) == sorted(BY_SYMBOL)
    names = [row["name"] for variant in DECODE.values() for row in variant.rows()]
    assert len(set(names)) == 90


def test_table_has_the_kernels_that_follow_trtllm_gen():
    others = BY_SYMBOL.keys() - DECODE.keys()
    assert others == {"sm100f_lse", *(f"sm100f_reduction_{output}" for output in ("bf16", "fp16", "e4m3"))}
    assert not any(BY_SYMBOL[symbol].rows() for symbol in others)
    assert table.REDUCTION.param_bytes == _core.REDUCTION_PARAM_BYTES
    assert table.LSE.param_bytes == _core.LSE_PARAM_BYTES


@pytest.mark.parametrize("variant", DECODE.values(), ids=DECODE)
def test_planned_ctas_fit_an_sm(variant):
    smem = variant.smem(variant.slots)
    assert smem <= 232448
    assert variant.ctas_per_sm * (smem + 1024) <= 233472
    assert variant.slots % 2 == 0 or not variant.swaps


def test_pack_depends_on_its_content_only(tmp_path):
    cubins = {"hopper/b.cubin": b"bb", "hopper/a.cubin": b"a"}
    tool.write_pack(tmp_path / "one.zip", cubins)
    tool.write_pack(tmp_path / "two.zip", dict(reversed(cubins.items())))
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    assert zipfile.ZipFile(tmp_path / "one.zip").namelist() == ["hopper/a.cubin", "hopper/b.cubin"]
    assert tool.read_pack(tmp_path / "one.zip") == cubins


def test_sources_follow_includes():
    names = {path.name for path in tool.includes(table.KERNELS / "sm90_decode.cu")}
    assert names >= {"sm90_decode.cu", "sm90_decode_swaps.cuh", "sm90_ptx.cuh", "kernel_params.h"}
    names = {path.name for path in tool.includes(table.KERNELS / "trtllm_gen_lse.cu")}
    assert names == {"trtllm_gen_lse.cu", "programmatic_launch.cuh", "kernel_params.h"}


def lock_of(variant, cubin: bytes, flags: list[str]) -> LockFile:
    family, path = variant.family, table.path_of(variant)
    digest = hashlib.sha256(cubin).hexdigest()
    artifact = Artifact(family.name, path, digest, len(cubin), family.arch, family.param_bytes, variant.symbol)
    entry = Family(family.param_bytes, tool.LAYOUT, toolchain=Toolchain(tool.NVCC_VERSION, tuple(flags)))
    return LockFile({family.name: entry}, (artifact,))


@pytest.mark.parametrize("symbol", ["sm90a_decode_bf16_d64_q8", "sm100f_reduction_bf16", "sm100f_lse"])
def test_check_compares_digests_and_toolchain(tmp_path, monkeypatch, symbol):
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    variant = BY_SYMBOL[symbol]
    flags = variant.family.nvcc_flags()
    (tmp_path / tool.LOCK).write_text(lock_of(variant, b"cubin", flags).dump())
    tool.check([tool.Built(variant, b"cubin", 64)])
    with pytest.raises(tool.Failure, match=re.escape(table.path_of(variant))) as failure:
        tool.check([tool.Built(variant, b"other", 64)])
    assert failure.value.code == 4
    (tmp_path / tool.LOCK).write_text(lock_of(variant, b"cubin", ["-O1"]).dump())
    with pytest.raises(tool.Failure, match="toolchain"):
        tool.check([tool.Built(variant, b"cubin", 64)])


def test_writing_keeps_the_families_of_others(tmp_path, monkeypatch):
    """And make_lock.py keeps ours (test_make_lock.py): the two may run in any order."""
    lock = LockFile.read(ROOT / tool.LOCK)
    built = [tool.Built(variant, cubin, 0) for variant, cubin in shipped().items()]
    nvidias = lock.replace_family("hopper", lock.families["hopper"], ())
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    (tmp_path / tool.DATA).mkdir(parents=True)
    (tmp_path / tool.LOCK).write_text(nvidias.dump())
    tool.write(built, keep=False)
    assert LockFile.read(tmp_path / tool.LOCK) == lock
    # Some built again, the others from the packs.
    tool.write([item for item in built if item.variant.symbol == "sm100f_lse"], keep=True)
    assert LockFile.read(tmp_path / tool.LOCK) == lock
    for family in table.FAMILIES:
        assert (tmp_path / tool.DATA / family.pack).read_bytes() == (ROOT / tool.DATA / family.pack).read_bytes()


def shipped() -> dict:
    """Cubin of each variant, from the packs."""
    cubins = {}
    for pack in {family.pack for family in table.FAMILIES}:
        cubins |= tool.read_pack(ROOT / tool.DATA / pack)
    assert cubins.keys() == {table.path_of(variant) for variant in BY_SYMBOL.values()}
    return {variant: cubins[table.path_of(variant)] for variant in BY_SYMBOL.values()}


def test_another_nvcc_is_refused(tmp_path, monkeypatch):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.86'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tool.Failure, match=r"nvcc 13\.0\.88 is needed .*12\.9\.86") as failure:
        tool.find_nvcc()
    assert failure.value.code == 1


def test_shipped_packs_manifest_and_lock_agree():
    manifest = (ROOT / tool.DATA / table.HOPPER.manifest).read_bytes()
    lock = LockFile.read(ROOT / tool.LOCK)
    for family in table.FAMILIES:
        assert {a.path: a.sha256 for a in lock.of_family(family.name)} == {
            table.path_of(variant): hashlib.sha256(cubin).hexdigest()
            for variant, cubin in shipped().items()
            if variant.family is family
        }
    assert manifest == Manifest.pack([row for variant in BY_SYMBOL.values() for row in variant.rows()])
    assert lock.families["hopper"].table.sha256 == hashlib.sha256(manifest).hexdigest()


GOOD = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P1 BRA `(.L_x_1) ;
.L_x_1:
        /*0020*/                   ACQBULK ;
        /*0030*/               @P0 LDG.E.STRONG.GPU R11, desc[UR14][R4.64] ;
        /*0040*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0048*/                   PREEXIT ;
.L_x_2:
        /*0050*/                   EXIT ;
"""


def test_listing_that_keeps_the_promises():
    wrong, counts = sass.faults(GOOD)
    assert not wrong
    assert counts["HGMMA"] == 1


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("LDC R1, c[0x0][0x28]", "LDG.E R1, desc[UR4][R2.64]", "LDG.E at 0x0 before ACQBULK"),
        ("(.L_x_1) ;", "(.L_x_2) ;", "BRA at 0x10 leads past ACQBULK"),
        ("HGMMA", "HMMA", "no HGMMA"),
        ("ACQBULK", "NOP", "no ACQBULK"),
        ("PREEXIT", "NOP", "no PREEXIT"),
        ("LDC R1", "LDL R1", "1 LDL"),
    ],
)
def test_listing_that_breaks_one(old, new, fault):
    assert fault in sass.faults(GOOD.replace(old, new))[0]


def test_kernels_without_matrix_products_need_none():
    assert sass.faults(GOOD.replace("HGMMA", "FFMA"), multiplies=False)[0] == []
