"""The bounded cubin reader: facts of real cubins, refusals, and no crash on any bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import resource
import time
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import PARAM_BYTES, artifact_of, make_cubin

from fmha_dispatch.cubin import read_cubin, verify
from fmha_dispatch.errors import IntegrityError
from fmha_dispatch.settings import LIMITS

DATA = Path(__file__).parents[1] / "data"
REAL = {path.stem.removeprefix("tiny_"): path.read_bytes() for path in sorted(DATA.glob("tiny_*.cubin"))}


@pytest.mark.parametrize("arch", REAL)
def test_reads_what_nvcc_wrote(arch: str) -> None:
    cubin = read_cubin(REAL[arch])
    assert cubin.arch == arch
    kernel = cubin.kernels["tiny"]
    assert (kernel.params, kernel.param_bytes) == ((PARAM_BYTES,), PARAM_BYTES)
    assert 0 < kernel.registers <= 32
    assert (kernel.frame_bytes, kernel.stack_bytes) == (0, 0)


def test_covers_plain_accelerated_and_family_targets() -> None:
    assert set(REAL) == {"sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a"}


@pytest.mark.parametrize("arch", REAL)
def test_second_opinion(arch: str) -> None:
    """pyelftools finds the same kernel and the same arch number."""
    with (DATA / f"tiny_{arch}.cubin").open("rb") as file:
        elf = ELFFile(file)
        symbols = elf.get_section_by_name(".symtab").iter_symbols()
        kernels = [
            s.name for s in symbols if s["st_info"]["type"] == "STT_FUNC" and s["st_info"]["bind"] == "STB_GLOBAL"
        ]
        assert sorted(read_cubin(REAL[arch]).kernels) == sorted(kernels)
        assert f"sm_{elf.header.e_flags >> 8 & 0xFF}" == arch.rstrip("af")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103a", "sm_120f"])
def test_synthetic_cubin_is_sound(arch: str) -> None:
    cubin = read_cubin(make_cubin("k", arch=arch, param_bytes=1408))
    assert cubin.arch == arch
    assert cubin.kernels["k"].param_bytes == 1408


def test_verify_accepts_and_returns_the_bytes_that_were_hashed() -> None:
    data = make_cubin("k")
    artifact = artifact_of("f/k.cubin", data, "k")
    verified = verify(data, artifact)
    assert verified.data is data
    assert (verified.name, verified.symbol, verified.sha256) == (artifact.path, "k", artifact.sha256)
    assert (verified.arch, verified.param_bytes) == ("sm_90a", PARAM_BYTES)


def test_every_flipped_byte_is_refused() -> None:
    """Show of issue 2: a damaged byte in any cubin is refused, whichever byte it is."""
    data = REAL["sm_90a"]
    artifact = artifact_of("f/k.cubin", data, "tiny")
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(IntegrityError, match="wrong digest"):
            verify(bytes(damaged), artifact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 5}, "wrong size"),
        ({"arch": "sm_100f"}, "wrong arch.*asked: sm_100f.*found: sm_90a"),
        ({"param_bytes": 1408}, "wrong parameter size.*1408 bytes.*1280 bytes"),
        ({"symbol": "other"}, "no such kernel.*asked: other.*found: k"),
    ],
)
def test_abi_drift_names_both_numbers(change: dict[str, object], message: str) -> None:
    """Fault 24: another size, arch, param_bytes or symbol is refused before the driver sees anything."""
    data = make_cubin("k")
    with pytest.raises(IntegrityError, match=message):
        verify(data, dataclasses.replace(artifact_of("f/k.cubin", data, "k"), **change))  # type: ignore[arg-type]


def test_label_and_elf_must_agree_on_the_family_target() -> None:
    """T2.11: a row labelled sm_100f whose ELF says sm_100a fails."""
    data = REAL["sm_100a"]
    with pytest.raises(IntegrityError, match="wrong arch"):
        verify(data, artifact_of("f/k.cubin", data, "tiny", arch="sm_100f"))


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>login</html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        (b"\x1f\x8b\x08\0", "compressed"),
        (b"hello", "not a cubin"),
    ],
)
def test_wrong_bytes_get_a_hint(data: bytes, hint: str) -> None:
    """T1.21: an HTML page with status 200 and its like are named as what they are, with a right digest or not."""
    with pytest.raises(IntegrityError, match=hint):
        verify(data, dataclasses.replace(artifact_of("f/k.cubin", b"x", "k"), size=len(data)))
    with pytest.raises(IntegrityError, match=hint):
        verify(data, artifact_of("f/k.cubin", data, "k"))


def mutations(data: bytes, rng: random.Random) -> bytes:
    """One of the ways in which files and tables get damaged."""
    kind = rng.randrange(6)
    out = bytearray(data)
    if kind == 0:
        return bytes(out[: rng.randrange(len(out))])
    if kind == 1:
        for _ in range(rng.randrange(1, 8)):
            out[rng.randrange(len(out))] = rng.randrange(256)
    elif kind == 2:  # an extreme number in the header or a section header
        at = rng.choice([rng.randrange(16, 64), rng.randrange(max(64, len(out) - 1024), len(out))])
        out[at : at + 8] = rng.choice([b"\xff" * 8, bytes(8), b"\xff" * 4 + bytes(4), (1 << 63).to_bytes(8, "little")])
    elif kind == 3:
        at, size = rng.randrange(len(out)), rng.randrange(1, 256)
        out[at : at + size] = bytes(size)
    elif kind == 4:
        at, to = rng.randrange(len(out)), rng.randrange(len(out))
        out[at : at + 64] = out[to : to + 64]
    else:
        out += rng.randbytes(rng.randrange(1, 256))
    return bytes(out)


def test_no_crash_on_damaged_cubins() -> None:
    """Fault 6: 10,000 mutated ELFs with a correct digest: no other exception, 5 ms each at most, no growth."""
    rng = random.Random(1)
    seeds = [*REAL.values(), make_cubin("k")]
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(10_000):
        data = mutations(seeds[index % len(seeds)], rng)
        started = time.thread_time()
        with contextlib.suppress(IntegrityError):
            verify(data, artifact_of("f/k.cubin", data, "tiny"))
        slowest = max(slowest, time.thread_time() - started)
    assert slowest < 0.005 * 3  # the limit, with room for a loaded machine
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=4096), st.booleans())
def test_no_crash_on_any_bytes(data: bytes, with_magic: bool) -> None:
    with contextlib.suppress(IntegrityError):
        read_cubin(b"\x7fELF\x02\x01\x01\x41\x08" + data if with_magic else data)


@pytest.mark.parametrize("field", ["more_attributes", "more_symbols"])
def test_tables_are_bounded(field: str) -> None:
    """As large as the limits allow: 5 ms. One larger: refused."""
    most = {"more_attributes": LIMITS.elf_attributes - 6, "more_symbols": LIMITS.elf_symbols - 2}[field]
    data = make_cubin("k", **{field: most})  # type: ignore[arg-type]
    started = time.thread_time()
    assert read_cubin(data).kernels
    assert time.thread_time() - started < 0.005 * 3
    with pytest.raises(IntegrityError, match=r"\d+ (attributes|symbols)"):
        read_cubin(make_cubin("k", **{field: most + 1}))  # type: ignore[arg-type]


def test_sizes_are_bounded() -> None:
    with pytest.raises(IntegrityError, match="more than 4096"):
        read_cubin(make_cubin("k", code=bytes(4096)), dataclasses.replace(LIMITS, cubin_bytes=4096))
