"""What a process is like before, without and after a driver: each case in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fake_driver.driver import build
from fmha_dispatch import _core
from fmha_dispatch.errors import DeviceError

TESTS = Path(__file__).parent.parent


def run(code: str, *arguments: object, **environment: str) -> str:
    """Output of `code` in a fresh interpreter that can import the tests."""
    prelude = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        cwd=TESTS,  # not the checkout, whose package has no extension in it
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_t4_15_import_and_select_initialise_nothing(fake_libcuda: Path) -> None:
    out = run(
        """
from pathlib import Path
from fake_driver.driver import load
fake = load(Path(sys.argv[1]))
import fmha_dispatch
from fmha_dispatch import _core, device, loader
from cpu.hopper_rows import H200, hopper_rows
from fake_driver.warm import problem
manifest = _core.Manifest(_core.Manifest.pack(hopper_rows()))
assert _core.select(problem(), manifest, _core.Device(**H200)).row >= 0
device.driver()
print(len(fake.calls()), "cuda" in sys.modules, "torch" in sys.modules)
""",
        fake_libcuda,
    )
    assert out == "0 False False"


def test_t4_15_works_without_a_driver() -> None:
    out = run(
        """
import ctypes
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    pass
else:
    print("a driver is installed")
    sys.exit()
import fmha_dispatch
from fmha_dispatch.device import describe
from fmha_dispatch.errors import DeviceError
try:
    describe(0)
except DeviceError as error:
    print(error.message)
"""
    )
    assert out in ("no CUDA driver on this machine", "a driver is installed")


def test_t4_15_fork_before_the_first_gpu_call_is_fine(fake_libcuda: Path) -> None:
    out = run(
        """
import os
from pathlib import Path
from fake_driver.driver import load
fake = load(Path(sys.argv[1]))
from fmha_dispatch import device
from fake_driver.warm import warm
device.driver()
pid = os.fork()
if pid == 0:
    warm().launch()
    assert [launch.result for launch in fake.launches] == [0]
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        fake_libcuda,
    )
    assert out == "7"


@pytest.mark.parametrize("call", ["plan.launch()", "describe(0)", "warm()"])
def test_t4_15_fork_after_load_is_a_clear_error_in_the_child(fake_libcuda: Path, call: str) -> None:
    out = run(
        """
import os
from pathlib import Path
from fake_driver.driver import load
fake = load(Path(sys.argv[1]))
from fake_driver.warm import warm
from fmha_dispatch.device import describe
from fmha_dispatch.errors import DeviceError
plan = warm(mode="GmemReduction")
plan.launch()
fake.clear()
pid = os.fork()
if pid == 0:
    try:
        eval(sys.argv[2])
    except DeviceError as error:
        os._exit(7 if "forked" in str(error) and "spawn" in str(error) and not fake.calls() else 8)
    os._exit(9)
plan.launch()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(fake.launches))
""",
        fake_libcuda,
        call,
    )
    assert out == "7 1"


@pytest.mark.parametrize(
    ("slow", "holder"),
    [
        ("cuInit", "describe(0)"),
        ("cuDevicePrimaryCtxRetain", "describe(0)"),
        ("cuLibraryLoadData", "warm()"),
    ],
)
@pytest.mark.parametrize("call", ["describe(0)", "load(tiny_cubin(), 0)", "warm()"])
def test_t4_15_fork_while_another_thread_loads_never_hangs(
    fake_libcuda: Path, slow: str, holder: str, call: str
) -> None:
    """The lock that the other thread holds stays held in the child, where that thread does not exist."""
    out = run(
        """
import os, threading, time
from pathlib import Path
from fake_driver.driver import load as load_fake
fake = load_fake(Path(sys.argv[1]))
from fake_driver.warm import tiny_cubin, warm
from fmha_dispatch.device import describe, driver
from fmha_dispatch.errors import DeviceError
from fmha_dispatch.loader import load
import cuda.bindings.driver
driver()
slow, holder, call = sys.argv[2:]
fake.delay(slow, 500_000)
results = []
thread = threading.Thread(target=lambda: results.append(eval(holder)))
thread.start()
before = {"cuInit": None, "cuDevicePrimaryCtxRetain": "cuDeviceGetName", "cuLibraryLoadData": "cuMemGetInfo_v2"}[slow]
while before and not fake.calls(before):
    time.sleep(0.001)
time.sleep(0.1)
assert thread.is_alive() and not results
pid = os.fork()
if pid == 0:
    try:
        eval(call)
    except DeviceError as error:
        os._exit(7 if "forked" in str(error) and "spawn" in str(error) else 8)
    os._exit(9)
deadline = time.monotonic() + 20
while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.01)
if not ended[0]:
    os.kill(pid, 9)
thread.join()
print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", len(results))
""",
        fake_libcuda,
        slow,
        holder,
        call,
    )
    assert out == "7 1"


def test_t4_15_fork_while_another_thread_is_about_to_initialise(fake_libcuda: Path) -> None:
    """The lock is held, but CUDA untouched: the child may use the GPU, as after any fork before the first call."""
    out = run(
        """
import os, threading, time
from pathlib import Path
from fake_driver.driver import load
fake = load(Path(sys.argv[1]))
from fake_driver.warm import warm
from fmha_dispatch import device
import cuda.bindings.driver
true_bindings, waiting, go = device.bindings, threading.Event(), threading.Event()
def held():
    waiting.set()
    go.wait()
    return true_bindings()
device.bindings = held
thread = threading.Thread(target=device.describe, args=(0,))
thread.start()
waiting.wait()
device.bindings = true_bindings
pid = os.fork()
if pid == 0:
    warm().launch()
    os._exit(7)
deadline = time.monotonic() + 20
while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.01)
if not ended[0]:
    os.kill(pid, 9)
go.set()
thread.join()
print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs")
""",
        fake_libcuda,
    )
    assert out == "7"


def test_t4_15_fork_after_a_failed_initialisation_is_fine(fake_libcuda: Path) -> None:
    out = run(
        """
import os
from pathlib import Path
from fake_driver.driver import load
fake = load(Path(sys.argv[1]))
from fake_driver.warm import warm
from fmha_dispatch.device import describe
from fmha_dispatch.errors import DriverError
fake.fail("cuInit", 802)
try:
    describe(0)
except DriverError:
    pass
pid = os.fork()
if pid == 0:
    warm().launch()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
        fake_libcuda,
    )
    assert out == "7"


def test_t2_16_a_driver_without_the_library_api_is_called_too_old(tmp_path: Path) -> None:
    old = build(tmp_path, defines=("WITHOUT_LIBRARIES",))
    with pytest.raises(DeviceError) as raised:
        _core.Driver(str(old))
    assert raised.value.message == "the CUDA driver is too old"
    assert raised.value.asked == "cuLibraryLoadData"
    assert str(old) in str(raised.value)


def test_a_library_that_is_no_driver(tmp_path: Path) -> None:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(b"not a library")
    with pytest.raises(DeviceError, match="no CUDA driver") as raised:
        _core.Driver(str(path))
    assert raised.value.asked == str(path)


def test_every_code_of_t2_15_has_words() -> None:
    for code in (2, 200, 209, 218, 222, 301, 303, 400, 700, 719, 900):
        assert _core.driver_error_cause(code)
    assert _core.driver_error_cause(9999) == ""


@pytest.mark.parametrize("mode", ["Disabled", "GmemReduction", "CgaSmemReduction"])
def test_t6_01_a_warm_launch_allocates_nothing(fake_libcuda: Path, tmp_path: Path, mode: str) -> None:
    counter = tmp_path / "count_malloc.so"
    source = TESTS / "fake_driver" / "count_malloc.c"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(counter), str(source)], check=True)
    out = run(
        """
import ctypes
from pathlib import Path
from fake_driver.driver import load
fake = load(Path(sys.argv[1]))
from fake_driver.warm import BUFFERS, warm
launch = warm(mode=sys.argv[3]).launcher.launch
fake.set_recording(False)
fake.set_current(-1)
stream = fake.new_stream()
calls = [list((BUFFERS | {"stream": stream, "q": BUFFERS["q"] + step % 7 * 4096}).values()) for step in range(100)]
for values in calls:
    launch(*values)
counter = ctypes.CDLL(sys.argv[2])
counter.count_start()
for values in calls:
    launch(*values)
print(counter.count_stop())
counter.count_start()
ctypes.CDLL(None).malloc(1)
assert counter.count_stop() > 0
""",
        fake_libcuda,
        counter,
        mode,
        LD_PRELOAD=str(counter),
    )
    assert out == "0"
