"""The profile of a row: user and kernel time per request, and the functions that take the time.

The split is measured on undisturbed nodes. The functions come from others that run under cProfile, which
makes every Python call dearer: read its column as shares, not as microseconds. Its clock is the thread's CPU clock: by
the wall, a write would be charged for the client that it wakes on the same core.
"""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidelog.bench.clusters import Alone, Cluster, RunningCluster
from tidelog.bench.compare import OPTIONS
from tidelog.bench.scenarios.base import Contestant, Scenario
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.fork_server import module_command
from tidelog.testing.processes import TidelogProcess

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProfiledTidelog(TidelogProcess):
    """A node under cProfile; the statistics are in `profile_file` once it has been stopped."""

    @property
    def profile_file(self) -> Path:
        return self.directory / "profile"

    def command(self) -> list[str]:
        return [*module_command("tidelog.bench.profiling"), str(self.profile_file), *self.arguments()]


@dataclass(frozen=True, slots=True)
class Split:
    """CPU of a node during one measurement, in seconds, by where it was spent."""

    user_s: float
    kernel_s: float

    @property
    def kernel_share(self) -> float:
        return self.kernel_s / max(self.user_s + self.kernel_s, 1e-9)


def cpu_split(pid: int) -> Split:
    """User and kernel seconds of a process so far, in steps of a tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return Split(int(fields[11]) / _TICKS_PER_S, int(fields[12]) / _TICKS_PER_S)


def measure_split(scenario: Scenario) -> tuple[dict[str, float], list[Split]]:
    """One warm measurement on nodes of its own: its figures, and the split of each node's CPU."""
    with _contestant(scenario, TidelogProcess) as contestant:
        scenario.warm(contestant, 0.2)
        before = [cpu_split(node.pid) for node in contestant.servers]
        figures = scenario.measure(contestant, 1.0)
        after = [cpu_split(node.pid) for node in contestant.servers]
    used = [Split(late.user_s - early.user_s, late.kernel_s - early.kernel_s) for early, late in zip(before, after)]
    return figures, used


def functions(scenario: Scenario, lines: int = 25) -> str:
    """The functions of each node with the most time of their own during the scenario."""
    out = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="tidelog-profile-") as kept:
        with _contestant(scenario, ProfiledTidelog) as contestant:
            scenario.measure(contestant, 1.0)
            nodes = [node for node in contestant.servers if isinstance(node, ProfiledTidelog)]
            contestant.cluster.stop()
            files = [Path(shutil.copy(node.profile_file, Path(kept, str(place)))) for place, node in enumerate(nodes)]
        for place, file in enumerate(files):
            out.write(f"\nnode {place + 1} of {len(files)}\n")
            pstats.Stats(str(file), stream=out).strip_dirs().sort_stats("tottime").print_stats(lines)
    return out.getvalue()


@contextmanager
def _contestant(scenario: Scenario, kind: type[TidelogProcess]) -> Iterator[Contestant]:
    """As many nodes of this kind as the scenario wants, running."""

    def make(directory: Path) -> Cluster:
        if scenario.brokers == 1:
            return Alone(kind(directory, options=OPTIONS))
        return EmbeddedCluster(
            scenario.brokers,
            directory,
            config=OPTIONS,
            make_node=lambda layout, home, options: kind(home, layout.port, options),
        )

    with (
        tempfile.TemporaryDirectory(prefix="tidelog-profile-") as scratch,
        RunningCluster(make(Path(scratch, "cluster"))) as running,
    ):
        yield Contestant("tidelog", running.cluster, make, Path(scratch), replicas=scenario.brokers)


def _run_under_profile(profile_file: str, arguments: list[str]) -> None:
    """What `ProfiledTidelog` starts: the command `tidelog` with its arguments, then the statistics."""
    profiler = cProfile.Profile(time.thread_time)
    sys.argv = ["tidelog", *arguments]
    try:
        profiler.runcall(runpy.run_module, "tidelog", run_name="__main__", alter_sys=True)
    finally:
        profiler.dump_stats(profile_file)


if __name__ == "__main__":
    _run_under_profile(sys.argv[1], sys.argv[2:])
