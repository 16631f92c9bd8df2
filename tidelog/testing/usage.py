"""The CPU time and memory of a process, read from another process.

CPU comes from the process's own CPU clock, which counts every thread, also those that
ended, in nanoseconds; the ticks of /proc/<pid>/stat would need ten thousand requests per
figure. Memory is the resident set.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
_PROCESS_SCHEDULER_CLOCK = 2
_WARM_PAGE_US = 3.5


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds (user and system, all threads) since the process began, and its resident memory
    now.
    """

    cpu_s: float
    rss_bytes: int

    @property
    def rss_mib(self) -> float:
        return self.rss_bytes / 2**20


def cpu_ns(pid: int) -> int:
    """CPU nanoseconds used by all threads of a process so far
    (`clock_getcpuclockid(3)`); OSError when it is gone.
    """
    return time.clock_gettime_ns((~pid << 3) | _PROCESS_SCHEDULER_CLOCK)


def rss_bytes(pid: int) -> int:
    """Resident set of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def usage(pid: int) -> Usage:
    """CPU and memory of one process."""
    return Usage(cpu_ns(pid) / 1e9, rss_bytes(pid))


def free_bytes() -> int:
    """Unused memory, which is not even page cache."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemFree"].split()[0]) * 1024


def warm_pages(size_bytes: int, passes_at_most: int = 4) -> float:
    """Touch and free memory, so that the host has backed as many pages as the next row will write.

    On a virtual machine a page never used before costs about 13 us, charged to the process that touches
    it first: 3 s of CPU per GB written, which would bury every difference between two brokers. The
    kernel may hand out other pages than those just freed, so this repeats while it meets cold ones.
    Returns the last pass's CPU microseconds per page.
    """
    cost_us = 0.0
    for _ in range(passes_at_most):
        pages = max(size_bytes // PAGE_BYTES, 1)
        with mmap.mmap(-1, pages * PAGE_BYTES) as memory:
            began_ns = time.process_time_ns()
            for position in range(0, pages * PAGE_BYTES, PAGE_BYTES):
                memory[position] = 1
            cost_us = (time.process_time_ns() - began_ns) / 1000 / pages
        if cost_us < _WARM_PAGE_US:
            break
    return cost_us
