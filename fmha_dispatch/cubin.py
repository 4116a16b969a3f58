"""What a cubin is, read from its bytes within bounds, and whether it is what the lock promises.

The driver returns success for an empty file and crashes the process on a damaged ELF, so that nothing reaches it that
did not pass `verify`: digest first, then structure, then arch, parameter size and symbol.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fmha_dispatch.errors import IntegrityError
from fmha_dispatch.lockfile import Artifact
from fmha_dispatch.settings import LIMITS, Limits

# ELF header of every cubin since CUDA 12.8: 64 bit, little endian, OS ABI 0x41, ABI version 8.
_IDENT = b"\x7fELF\x02\x01\x01\x41\x08"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_EXEC, _CUDA = 2, 190
_SHT_NULL, _SHT_SYMTAB, _SHT_STRTAB, _SHT_RELA, _SHT_NOBITS, _SHT_REL = 0, 2, 3, 4, 8, 9
_STT_FUNC, _STB_GLOBAL, _STO_ENTRY = 2, 1, 0x10
_SHN_RESERVED = 0xFF00
# Bit 3 of e_flags: code for one compute capability only (sm_NNa), as CUDA 12 wrote it; CUDA 13 has .nv.compat.
_FLAG_ACCELERATED = 0x8

# Attributes of .nv.info (per cubin and per kernel) and .nv.compat: a format, a number, and 2 bytes of value or size.
_SIZED_VALUE = 4
_FRAME_SIZE, _MIN_STACK_SIZE, _CBANK_PARAM_SIZE, _KPARAM_INFO, _REGCOUNT = 0x11, 0x12, 0x19, 0x17, 0x2F
_PARAM_CBANK = 0x0A
_COMPAT_ACCELERATED = 0x09


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry point.

    Attributes:
        symbol: its name.
        param_bytes: from the first by-value parameter to the end of the last.
        params: size of each parameter in order.
        registers: per thread.
        static_smem_bytes: shared memory that the launch need not ask for, the driver's reserved part included.
        frame_bytes, stack_bytes: local memory per thread; 0 when everything stays in registers.
    """

    symbol: str
    param_bytes: int
    params: tuple[int, ...]
    registers: int
    static_smem_bytes: int
    frame_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """What the ELF says.

    Attributes:
        arch: ``sm_90a`` and the like.
        kernels: entry points by symbol.
    """

    arch: str
    kernels: dict[str, Kernel]


@dataclass(frozen=True, slots=True)
class VerifiedCubin:
    """Bytes that passed every check: what was hashed is what `data` holds.

    Attributes:
        name: the artifact's path in the lock.
        symbol: the kernel to take from it.
        data: the bytes for the driver.
        sha256, arch, param_bytes: as in the lock and, checked, as in the bytes.
    """

    name: str
    symbol: str
    data: bytes
    sha256: str
    arch: str
    param_bytes: int


def verify(data: bytes, artifact: Artifact) -> VerifiedCubin:
    """Checks size, digest, ELF structure, arch, parameter size and symbol, in this order.

    Raises:
        IntegrityError: naming the artifact, what the lock promises and what was found.
    """

    def refuse(message: str, asked: object, found: object) -> IntegrityError:
        return IntegrityError(f"{artifact.path}: {message}", asked=asked, found=found)

    if len(data) != artifact.size:
        raise refuse("wrong size", f"{artifact.size} bytes", f"{len(data)} bytes{_looks_like(data)}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != artifact.sha256:
        raise refuse("wrong digest", f"sha256 {artifact.sha256}", f"{digest}{_looks_like(data)}")
    try:
        cubin = read_cubin(data)
    except IntegrityError as error:
        raise refuse(f"damaged, although the digest is the lock's: {error.message}", error.asked, error.found) from None
    if cubin.arch != artifact.arch:
        raise refuse("wrong arch", artifact.arch, cubin.arch)
    kernel = cubin.kernels.get(artifact.symbol)
    if kernel is None:
        raise refuse("no such kernel", artifact.symbol, ", ".join(sorted(cubin.kernels))[:500] or "no kernel at all")
    if kernel.param_bytes != artifact.param_bytes:
        raise refuse("wrong parameter size", f"{artifact.param_bytes} bytes", f"{kernel.param_bytes} bytes")
    return VerifiedCubin(artifact.path, artifact.symbol, data, digest, cubin.arch, kernel.param_bytes)


def _looks_like(data: bytes) -> str:
    """A hint for bytes that are no cubin at all."""
    head = data[:512].lstrip().lower()
    if not data:
        return " (empty)"
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return " (an HTML page: a proxy or a login page answered)"
    if head.startswith(b"version https://git-lfs"):
        return " (a Git LFS pointer, not the file)"
    if data.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return " (compressed)"
    return "" if data.startswith(b"\x7fELF") else " (no ELF magic: not a cubin)"


def read_cubin(data: bytes, limits: Limits = LIMITS) -> Cubin:
    """Reads a cubin; every offset is checked against the bytes before it is used.

    Raises:
        IntegrityError: anything but a structurally sound cubin.
    """
    try:
        return _Reader(data, limits).cubin()
    except struct.error as error:  # a table cut short
        raise _damaged(str(error)) from None


def _damaged(message: str) -> IntegrityError:
    return IntegrityError(f"not a sound cubin: {message}")


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise _damaged(message)


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    type: int
    offset: int
    size: int
    link: int
    info: int
    entry_bytes: int


class _Reader:
    """One pass over the tables of one file."""

    def __init__(self, data: bytes, limits: Limits) -> None:
        self.data = data
        self.limits = limits
        self.attributes_left = limits.elf_attributes

    def cubin(self) -> Cubin:
        data = self.data
        _need(len(data) <= self.limits.cubin_bytes, f"{len(data)} bytes, more than {self.limits.cubin_bytes}")
        _need(len(data) >= _HEADER.size and data.startswith(_IDENT), f"starts with {data[:9].hex()}{_looks_like(data)}")
        (_, kind, machine, version, _, phoff, shoff, flags, ehsize, phentsize, phnum, shentsize, shnum, names) = (
            _HEADER.unpack_from(data)
        )
        _need(
            (kind, machine, version, ehsize, shentsize) == (_EXEC, _CUDA, 1, _HEADER.size, _SECTION.size),
            "the header is no CUDA executable's",
        )
        _need(0 < shnum <= self.limits.elf_sections, f"{shnum} sections")
        _need(0 < names < shnum, f"section names in section {names} of {shnum}")
        sections = self._sections(shoff, shnum, names)
        self._segments(phoff, phnum, phentsize)
        self._no_overlap(sections, shoff, shnum, phoff, phnum)
        tables = [s for s in sections if s.type == _SHT_SYMTAB]
        _need(len(tables) == 1, f"{len(tables)} symbol tables")
        symbols = self._symbols(tables[0], sections)
        self._relocations(sections, len(symbols))
        by_name = {section.name: section for section in sections}
        _need(len(by_name) == len(sections), "two sections of one name")
        return Cubin(self._arch(flags, by_name), self._kernels(symbols, sections, by_name))

    def _sections(self, offset: int, count: int, names: int) -> list[_Section]:
        end = offset + count * _SECTION.size
        _need(_HEADER.size <= offset and end <= len(self.data), "section headers outside the file")
        rows = [_SECTION.unpack_from(self.data, offset + i * _SECTION.size) for i in range(count)]
        sections = []
        for index, (name, kind, _, _, start, size, link, info, align, entry_bytes) in enumerate(rows):
            _need(index > 0 or kind == _SHT_NULL, "the first section is not null")
            _need(
                kind in (_SHT_NOBITS, _SHT_NULL) or start + size <= len(self.data), f"section {index} outside the file"
            )
            _need(align & (align - 1) == 0, f"section {index}: alignment {align}")
            _need(link < count, f"section {index} linked to section {link} of {count}")
            sections.append(_Section("", kind, start, size, link, info, entry_bytes))
            rows[index] = (name, *rows[index][1:])
        table = sections[names]
        _need(table.type == _SHT_STRTAB, "section names are no string table")
        return [
            _Section(self._string(table, row[0]), s.type, s.offset, s.size, s.link, s.info, s.entry_bytes)
            for row, s in zip(rows, sections, strict=True)
        ]

    def _string(self, table: _Section, offset: int) -> str:
        _need(offset < table.size, "a name outside its string table")
        start, stop = table.offset + offset, table.offset + table.size
        end = self.data.find(b"\0", start, min(stop, start + 4096))
        _need(end >= 0, "a name without an end")
        raw = self.data[start:end]
        _need(raw.isascii(), "a name that is not ASCII")
        return raw.decode("ascii")

    def _segments(self, offset: int, count: int, entry_bytes: int) -> None:
        if count == 0:
            return
        _need(entry_bytes == _SEGMENT.size and count <= self.limits.elf_sections, f"{count} program headers")
        _need(offset + count * _SEGMENT.size <= len(self.data), "program headers outside the file")
        for _, _, start, _, _, size, in_memory, _ in _SEGMENT.iter_unpack(
            self.data[offset : offset + count * _SEGMENT.size]
        ):
            _need(start + size <= len(self.data) and size <= in_memory, "a segment outside the file")

    def _no_overlap(self, sections: list[_Section], shoff: int, shnum: int, phoff: int, phnum: int) -> None:
        # A set: two sections may be the same bytes (.nv.constant4 and its .nv.merc twin), never a part of each other.
        spans = {(s.offset, s.size) for s in sections if s.type not in (_SHT_NOBITS, _SHT_NULL) and s.size}
        spans |= {(0, _HEADER.size), (shoff, shnum * _SECTION.size), (phoff, phnum * _SEGMENT.size)}
        end = 0
        for start, size in sorted(span for span in spans if span[1]):
            _need(start >= end, f"two parts of the file overlap at byte {start}")
            end = start + size

    def _symbols(self, table: _Section, sections: list[_Section]) -> list[tuple[str, int, int, int]]:
        """Name, kind and binding, section and visibility bits of each symbol."""
        _need(table.entry_bytes == _SYMBOL.size and table.size % _SYMBOL.size == 0, "symbols of another size")
        _need(table.size // _SYMBOL.size <= self.limits.elf_symbols, f"{table.size // _SYMBOL.size} symbols")
        strings = sections[table.link]
        _need(strings.type == _SHT_STRTAB, "symbol names are no string table")
        symbols = []
        body = self.data[table.offset : table.offset + table.size]
        for name, info, other, index, value, size in _SYMBOL.iter_unpack(body):
            _need(index < len(sections) or index >= _SHN_RESERVED, f"a symbol in section {index}")
            if info & 0xF == _STT_FUNC and 0 < index < len(sections):
                _need(value + size <= sections[index].size, "a function outside its section")
            symbols.append((self._string(strings, name), info, other, index))
        return symbols

    def _relocations(self, sections: list[_Section], symbols: int) -> None:
        total = 0
        for section in sections:
            if section.type not in (_SHT_RELA, _SHT_REL):
                continue
            size = 24 if section.type == _SHT_RELA else 16
            _need(section.entry_bytes == size and section.size % size == 0, "relocations of another size")
            _need(0 < section.info < len(sections), f"relocations for section {section.info}")
            total += section.size // size
            _need(total <= self.limits.elf_relocations, f"more than {self.limits.elf_relocations} relocations")
            target = sections[section.info]
            words = struct.Struct("<QQ" + "8x" * (size == 24))
            for where, info in words.iter_unpack(self.data[section.offset : section.offset + section.size]):
                _need(where < target.size, f"a relocation outside {target.name}")
                _need(info >> 32 < symbols, f"a relocation to symbol {info >> 32} of {symbols}")

    def _attributes(self, section: _Section) -> Iterator[tuple[int, int, bytes]]:
        """Number, 16-bit value, and bytes of each attribute."""
        data, position, end = self.data, section.offset, section.offset + section.size
        while position < end:
            self.attributes_left -= 1
            _need(self.attributes_left >= 0, f"more than {self.limits.elf_attributes} attributes")
            _need(position + 4 <= end, f"{section.name} is cut short")
            form, number, value = struct.unpack_from("<BBH", data, position)
            _need(1 <= form <= 4, f"{section.name} has an attribute of format {form}")
            position += 4
            body = b""
            if form == _SIZED_VALUE:
                _need(position + value <= end, f"{section.name} has an attribute that ends outside")
                body = data[position : position + value]
                position += value
            yield number, value, body

    def _arch(self, flags: int, sections: dict[str, _Section]) -> str:
        number = flags >> 8 & 0xFF
        _need(number > 0, f"e_flags {flags:#x} names no compute capability")
        accelerated = bool(flags & _FLAG_ACCELERATED)
        if (compat := sections.get(".nv.compat")) is not None:
            for attribute, value, _ in self._attributes(compat):
                accelerated |= attribute == _COMPAT_ACCELERATED and value & 0xFF == 1
        stated: str | None = None
        if (tool := sections.get(".note.nv.tkinfo")) is not None:
            note = self.data[tool.offset : tool.offset + min(tool.size, 65536)]
            if (found := re.search(rb"-arch (sm_([0-9]{2,3})[af]?)[ \0]", note)) is not None:
                stated = found[1].decode()
                _need(int(found[2]) == number, f"compiled with -arch {stated}, but e_flags say sm_{number}")
        if accelerated:
            _need(stated in (None, f"sm_{number}a"), f"compiled with -arch {stated}, but marked as sm_{number}a")
            return f"sm_{number}a"
        # Only the compiler's note tells sm_100f from sm_100: the machine code is the same.
        _need(stated != f"sm_{number}a", f"compiled with -arch {stated}, but not marked so")
        return stated or f"sm_{number}"

    def _kernels(
        self, symbols: list[tuple[str, int, int, int]], sections: list[_Section], by_name: dict[str, _Section]
    ) -> dict[str, Kernel]:
        per_symbol: dict[tuple[int, int], int] = {}
        if (common := by_name.get(".nv.info")) is not None:
            for attribute, _, body in self._attributes(common):
                if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
                    _need(len(body) == 8, "a resource attribute of another size")
                    index, value = struct.unpack("<II", body)
                    _need(index < len(symbols), f"an attribute of symbol {index} of {len(symbols)}")
                    per_symbol[attribute, index] = value
        # Functions of one section share its local memory: the largest frame counts.
        frames: dict[int, int] = {}
        for (attribute, index), value in per_symbol.items():
            if attribute == _FRAME_SIZE:
                section_index = symbols[index][3]
                frames[section_index] = max(value, frames.get(section_index, 0))
        kernels = {}
        for index, (name, info, other, section_index) in enumerate(symbols):
            if info != (_STB_GLOBAL << 4 | _STT_FUNC) or not other & _STO_ENTRY:
                continue
            _need(name not in kernels, f"two kernels named {name}")
            _need(
                section_index < len(sections) and sections[section_index].name == f".text.{name}",
                f"the code of {name} is not in .text.{name}",
            )
            attributes = by_name.get(f".nv.info.{name}")
            if attributes is None:
                raise _damaged(f"no attributes of {name}")
            param_bytes, params = self._params(name, attributes, by_name.get(f".nv.constant0.{name}"))
            shared = by_name.get(f".nv.shared.{name}")
            kernels[name] = Kernel(
                symbol=name,
                param_bytes=param_bytes,
                params=params,
                registers=per_symbol.get((_REGCOUNT, index), 0),
                static_smem_bytes=shared.size if shared else 0,
                frame_bytes=frames.get(section_index, 0),
                stack_bytes=per_symbol.get((_MIN_STACK_SIZE, index), 0),
            )
        return kernels

    def _params(self, name: str, attributes: _Section, bank: _Section | None) -> tuple[int, tuple[int, ...]]:
        """Bytes from the first parameter to the end of the last, and of each.

        The parameter area (EIATTR_CBANK_PARAM_SIZE) may start with padding: 0x70 bytes on sm_90 before a struct of
        alignment 128, because the area itself starts at 0x210 of the bank.
        """
        area, params = 0, {}
        for attribute, value, body in self._attributes(attributes):
            if attribute == _CBANK_PARAM_SIZE:
                area = value
            elif attribute == _KPARAM_INFO:
                _need(len(body) == 12, f"a parameter description of {name} of another size")
                ordinal, offset, packed = struct.unpack_from("<HHI", body, 4)
                params[ordinal] = (offset, packed >> 18)
            elif attribute == _PARAM_CBANK:
                _need(len(body) == 8, f"the constant bank of {name} has another description")
                start, size = struct.unpack_from("<HH", body, 4)
                _need(bank is not None and start + size <= bank.size, f"parameters of {name} outside its constant bank")
        _need(sorted(params) == list(range(len(params))), f"parameters of {name} are not numbered from 0")
        if not params:
            return area, ()
        last = max(offset + size for offset, size in params.values())
        _need(last <= area, f"parameters of {name} end at {last}, outside their {area} bytes")
        sizes = tuple(params[ordinal][1] for ordinal in range(len(params)))
        return last - min(offset for offset, _ in params.values()), sizes
