"""Standard output of commands whose reader may go away, as in ``fmha-dispatch verify | head``."""

from __future__ import annotations

import contextlib
import os
import sys


def silence_stdout() -> None:
    """After a broken pipe: nothing more is said on stdout, not even by the interpreter's own flush at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
