"""What a process has used: CPU time and memory, read from outside.

CPU comes from the process's own CPU clock, which counts every thread, also those that ended, in nanoseconds; the ticks
of /proc/<pid>/stat would need ten thousand requests per figure. Memory is the resident set.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = mmap.PAGESIZE
_PROCESS_SCHEDULER_CLOCK = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds (user and system, all threads) since the process began, and its resident memory now."""

    cpu_s: float
    rss_bytes: int

    @property
    def rss_mib(self) -> float:
        return self.rss_bytes / 2**20


def cpu_ns(pid: int) -> int:
    """CPU nanoseconds used by all threads of a process so far (`clock_getcpuclockid(3)`); OSError when it is gone."""
    return time.clock_gettime_ns((~pid << 3) | _PROCESS_SCHEDULER_CLOCK)


def rss_bytes(pid: int) -> int:
    """Resident set of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def usage(pid: int) -> Usage:
    """CPU and memory of one process."""
    return Usage(cpu_ns(pid) / 1e9, rss_bytes(pid))


def warm_pages(size_bytes: int) -> None:
    """Touch and free memory, so that the host has backed as many pages as the next row will write.

    On a virtual machine a page never used before costs about 13 us, charged to whoever touches it first: 3 s of CPU per
    GB written, which would bury every difference between two brokers.
    """
    if size_bytes <= 0:
        return
    with mmap.mmap(-1, size_bytes) as memory:
        for position in range(0, size_bytes, PAGE_BYTES):
            memory[position] = 1
