#!/usr/bin/env python3
"""Reads the machine code of our packs and checks what the source promises.

* Matrix products of the hopper family are wgmma (HGMMA); none anywhere is the older HMMA.
* No local memory (LDL, STL).
* Kernels let the next one start (PREEXIT, griddepcontrol.launch_dependents).
* The wait for prerequisite grids (ACQBULK, griddepcontrol.wait) comes before global memory is touched: nothing in front
  of it in the code reads or writes global memory, and no jump in front of it leads past it.

This is a linear scan of the listing, not a proof over all paths. nvdisasm comes from the PyPI package
``nvidia-cuda-nvdisasm`` or from PATH.

    tools/check_sass.py [REGEX]

Exit codes: 0 ok, 1 user (no nvdisasm, no such cubin), 2 a check failed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "fmha_dispatch/data"
PACKS = ("hopper.zip", "trtllm_gen.zip")

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*);")
GLOBAL = re.compile(r"(LDG|LDGSTS|LD|STG|ST|ATOM|ATOMG|RED|REDG|UTMALDG|UTMASTG|UTMAREDG|UBLKCP)(\.|$)")


def find_nvdisasm() -> str | None:
    """The PyPI package's, else PATH's."""
    for entry in sys.path:
        path = Path(entry) / "nvidia/cu13/bin/nvdisasm"
        if entry and path.is_file():
            return str(path)
    return shutil.which("nvdisasm")


def faults(listing: str, multiplies: bool = True) -> tuple[list[str], Counter[str]]:
    """What is wrong with one kernel's listing, and how often each opcode occurs.

    Args:
        multiplies: the kernel has matrix products.
    """
    code: list[tuple[int, str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((int(found[1], 16), found[2], found[3]))
    counts = Counter(opcode.split(".")[0] for _, opcode, _ in code)
    wrong = [f"{counts[name]} {name}" for name in ("HMMA", "LDL", "STL") if counts[name]]
    if multiplies and not counts["HGMMA"]:
        wrong.append("no HGMMA")
    if not counts["PREEXIT"]:
        wrong.append("no PREEXIT")
    wait = next((i for i, (_, opcode, _) in enumerate(code) if opcode == "ACQBULK"), None)
    if wait is None:
        return [*wrong, "no ACQBULK"], counts
    for address, opcode, operands in code[:wait]:
        if GLOBAL.match(opcode):
            wrong.append(f"{opcode} at {address:#x} before ACQBULK")
        if opcode.split(".")[0] in ("BRA", "BRX", "JMP", "JMX", "CALL", "EXIT", "RET"):
            target = re.search(r"\.L_x_\d+", operands)
            if target is None or labels[target[0]] > wait:
                wrong.append(f"{opcode} at {address:#x} leads past ACQBULK")
    return wrong, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("regex", nargs="?", default="", help="cubins whose path matches; all if absent")
    args = parser.parse_args()
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        print("check_sass: no nvdisasm: pip install nvidia-cuda-nvdisasm", file=sys.stderr)
        return 1
    failed = found = False
    for archive in PACKS:
        with zipfile.ZipFile(DATA / archive) as pack, tempfile.TemporaryDirectory() as folder:
            for name in filter(re.compile(args.regex).search, pack.namelist()):
                found = True
                path = pack.extract(name, folder)
                listing = subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout
                wrong, counts = faults(listing, multiplies=name.startswith("hopper/"))
                failed |= bool(wrong)
                seen = f"{counts['HGMMA']} HGMMA, {counts['UTMALDG']} UTMALDG, {sum(counts.values())} instructions"
                print(f"{name}: {'; '.join(wrong) or 'ok'} ({seen})")
    if not found:
        print(f"check_sass: nothing matches {args.regex!r}", file=sys.stderr)
        return 1
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
