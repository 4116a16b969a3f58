"""Packed manifest tables: opened by their digest in the lock, once a process."""

from __future__ import annotations

import functools
import hashlib

from fmha_dispatch import _core
from fmha_dispatch.errors import IntegrityError, Unsupported
from fmha_dispatch.lockfile import installed_lock
from fmha_dispatch.sources import DATA, read_file


@functools.cache
def load_manifest(family: str) -> _core.Manifest:
    """The rows of `family`.

    Raises:
        Unsupported: the lock has no such family, or it has no table.
        IntegrityError: the table is missing or not the one that the lock names.
    """
    lock = installed_lock()
    entry = lock.families.get(family)
    if entry is None or entry.table is None:
        with_table = sorted(name for name, known in lock.families.items() if known.table)
        raise Unsupported("no such kernel family", asked=family, found=", ".join(with_table) or "none")
    table = entry.table
    data = read_file(DATA / table.file, table.size)
    digest = None if data is None else hashlib.sha256(data).hexdigest()
    if data is None or digest != table.sha256:
        raise IntegrityError(
            f"manifest table {table.file} is not the one of cubins.lock",
            asked=f"sha256 {table.sha256}, {table.size} bytes",
            found="no file" if data is None else f"sha256 {digest}, {len(data)} bytes",
            fix="reinstall fmha-dispatch",
        )
    try:
        return _core.Manifest(data)
    except ValueError as error:
        raise IntegrityError(f"manifest table {table.file}: {error}", fix="reinstall fmha-dispatch") from error
