"""A load of compiled loops, and the end of the interpreter beside it."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

PROGRAM = """
import asyncio, ctypes, sys, time
from tidelog.client.network.kernel_loading import KernelLoading

def work():
    for _ in range(100_000):
        time.sleep(0.01)

def load():
    ctypes.CFUNCTYPE(None)(work)()  # as the compiler calls back: what is raised there goes no further
    try:
        work()
    except BaseException:
        pass
    work()

async def main():
    loading = KernelLoading(load, lambda: None)
    loading.start()
    await asyncio.sleep(0.05)
    await loading.close()

asyncio.run(main())
print("the program has ended")
"""


def test_the_end_of_the_interpreter_stops_a_load() -> None:
    """A short program that had read 50,000 records in a new container stayed for half a minute, for a compilation."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=PATIENCE_S, check=True)
    assert (run.stdout, run.stderr) == (b"the program has ended\n", b"")
