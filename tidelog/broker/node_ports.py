"""The world as a node meets it: disk, sockets, clock, chance, threads. Given in, so that a simulator can be them all.

The event loop is the port for everything in between (connections, timers): a node takes the one it is started on.
"""

from __future__ import annotations

import random
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tidelog.broker.network.server import bind
from tidelog.storage.files.disk import Disk, OsDisk

# fsync, cold reads and recovery: the device is the limit, not the threads.
IO_THREADS_MAX = 8
# The syncs and cold reads of each log directory, if there are several.
DIRECTORY_THREADS = 4
# The sync of the metadata log or a vote, the writing of a snapshot, and a look for damage.
QUORUM_THREADS = 3
# A name that no server answers for occupies one for seconds.
RESOLVER_THREADS = 2


@dataclass(frozen=True, slots=True)
class NodePorts:
    """`executor` goes to `loop.run_in_executor` and is shut down with the node; `clock_ms` is wall time since 1970.

    `bind(host, port)` gives a bound socket that the loop can listen on; OSError when it cannot. `boot_id` is another
    one after each start of the machine: while it is the same, nothing that was written is lost; empty if unknown.
    `stopwatch`: seconds, for durations shorter than a turn of the loop; None takes the loop's time. `files_max`: how
    many files and sockets the process may have open, 0 if there is no limit. `inspector`: one thread, as `executor`,
    for batches that take much memory to look at, of which each thread would keep some. `resolver`: threads that look up
    the names of other nodes' hosts. `quorum`: as `executor`, for the files of the metadata log and the votes, which
    must not wait behind cold reads of clients. `start_threads(count, name)` starts another executor; those of
    `of_directories`, by path, are shut down with the node, too.
    """

    disk: Disk
    bind: Callable[[str, int], socket.socket]
    clock_ms: Callable[[], int]
    rng: random.Random
    executor: Executor | None
    boot_id: str = ""
    stopwatch: Callable[[], float] | None = None
    files_max: int = 0
    inspector: Executor | None = None
    resolver: Executor | None = None
    quorum: Executor | None = None
    start_threads: Callable[[int, str], Executor] | None = None

    of_directories: Mapping[str, Executor] = field(default_factory=dict)

    def with_threads_of(self, directories: Collection[Path]) -> NodePorts:
        """With threads for each log directory, if there are several: a slow device then holds up no other directory.

        Raises RuntimeError as `os_ports`.
        """
        if self.start_threads is None or len(directories) < 2:
            return self
        start = partial(self.start_threads, DIRECTORY_THREADS, "tidelog-directory")
        return replace(self, of_directories={str(path): start() for path in directories})

    def threads_of(self, directory: str) -> Executor | None:
        """For the syncs and cold reads of the log directory with this path."""
        return self.of_directories.get(directory, self.executor)


def wall_clock_ms() -> int:
    """The one source of record timestamps."""
    return time.time_ns() // 1_000_000


def os_ports() -> NodePorts:
    """The machine we run on. Raises RuntimeError if it has no threads for the node."""
    return NodePorts(
        disk=OsDisk(),
        bind=bind,
        clock_ms=wall_clock_ms,
        rng=random.Random(secrets.randbits(64)),
        executor=_started_threads(IO_THREADS_MAX, "tidelog-io"),
        boot_id=_boot_id(),
        stopwatch=time.perf_counter,
        files_max=_files_max(),
        inspector=_started_threads(1, "tidelog-inspector"),
        resolver=_started_threads(RESOLVER_THREADS, "tidelog-names"),
        quorum=_started_threads(QUORUM_THREADS, "tidelog-quorum"),
        start_threads=_started_threads,
    )


def _started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """An executor that has all its threads now: one that it starts later may be refused, in the middle of the work of a
    node that serves. Raises RuntimeError, as `Thread.start`, if the system refuses one.
    """
    executor = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_run = threading.Event()
    try:
        for _ in range(count):
            executor.submit(all_run.wait)
    finally:
        all_run.set()
    return executor


def _files_max() -> int:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 0 if most == resource.RLIM_INFINITY else most


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""  # not Linux
