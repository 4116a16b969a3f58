"""Host time of one warm `Launcher.launch` on the recording fake driver, whose own calls cost next to nothing.

    python tools/bench/host_overhead.py

Prints nanoseconds a call, best and median of the rounds; on an H200 the driver's part (2 to 3 us a launch) comes on
top. A measurement, never a test.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from fake_driver.driver import build, load
from fake_driver.warm import BUFFERS, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000, help="calls a round")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake = load(build(Path(folder)))
    fake.set_recording(False)
    print(f"{'case':44} {'best':>7} {'median':>7}  ns a call")
    for mode in ("Disabled", "CgaSmemReduction", "GmemReduction"):
        launch = warm(mode=mode).launcher.launch
        stream = fake.new_stream()
        for title, current, moves in (
            ("all pointers as before", 0, False),
            ("a new query each call", 0, True),
            ("context not current", -1, False),
        ):
            fake.set_current(current)
            values = list((BUFFERS | {"stream": stream}).values())
            rounds = []
            for _ in range(arguments.rounds):
                start = time.perf_counter_ns()
                if moves:
                    for step in range(arguments.calls):
                        launch(values[0] + 4096 * step, *values[1:])
                else:
                    for _ in range(arguments.calls):
                        launch(*values)
                rounds.append((time.perf_counter_ns() - start) / arguments.calls)
            print(f"{mode + ', ' + title:44} {min(rounds):7.0f} {statistics.median(rounds):7.0f}")


if __name__ == "__main__":
    main()
