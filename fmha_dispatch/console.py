"""What commands share at the terminal: paths in, and a stdout whose reader may go away, as in ``verify | head``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path


def path_option(text: str) -> Path:
    """A path from the command line. A URL is none, and would show its password wherever the path is named."""
    if "://" in text:
        raise argparse.ArgumentTypeError("a path belongs here, not a URL")
    return Path(text)


def silence_stdout() -> None:
    """After a broken pipe: nothing more is said on stdout, not even by the interpreter's own flush at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
