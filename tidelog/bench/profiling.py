"""Why a row costs what it costs: user and kernel time per request, and the functions the time goes to.

The split is measured on an undisturbed node. The functions come from a second node that runs under cProfile, which
makes every Python call dearer: read its column as shares, not as microseconds. Its clock is the thread's CPU clock: by
the wall, a write would be charged for the client that it wakes on the same core.
"""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tidelog.bench.clusters import Alone
from tidelog.bench.compare import OPTIONS
from tidelog.bench.processes import TidelogProcess
from tidelog.bench.scenarios.base import Contestant, Scenario

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProfiledTidelog(TidelogProcess):
    """A node under cProfile; the statistics are in `profile_file` once it has been stopped."""

    @property
    def profile_file(self) -> Path:
        return self.directory / "profile"

    def command(self) -> list[str]:
        arguments = super().command()[3:]
        return [sys.executable, "-m", "tidelog.bench.profiling", str(self.profile_file), *arguments]


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


def measure_split(scenario: Scenario) -> tuple[dict[str, float], Split]:
    """One warm measurement on a node of its own: its figures, and the split of its CPU."""
    with (
        tempfile.TemporaryDirectory(prefix="tidelog-profile-") as scratch,
        TidelogProcess(Path(scratch, "node"), options=OPTIONS) as node,
    ):
        contestant = _contestant(node, scratch)
        scenario.warm(contestant, 0.2)
        before = cpu_split(node.pid)
        figures = scenario.measure(contestant, 1.0)
        after = cpu_split(node.pid)
    return figures, Split(after.user_s - before.user_s, after.kernel_s - before.kernel_s)


def functions(scenario: Scenario, lines: int = 25) -> str:
    """The functions of the node with the most time of their own during the scenario."""
    with tempfile.TemporaryDirectory(prefix="tidelog-profile-") as scratch:
        node = ProfiledTidelog(Path(scratch, "node"), options=OPTIONS)
        with node:
            scenario.measure(_contestant(node, scratch), 1.0)
        out = io.StringIO()
        statistics = pstats.Stats(str(node.profile_file), stream=out)
        statistics.strip_dirs().sort_stats("tottime").print_stats(lines)
    return out.getvalue()


def _contestant(node: TidelogProcess, scratch: str) -> Contestant:
    return Contestant("tidelog", Alone(node), lambda directory: Alone(type(node)(directory)), Path(scratch))


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
