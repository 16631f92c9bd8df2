"""Run many histories of a cluster on all the cores there are.

python -m tests.simulation.run_cluster --seeds 10000 --first 0 --jobs 2
python -m tests.simulation.run_cluster --first 7 --seeds 1 --verbose     the report of one history
python -m tests.simulation.run_cluster --minimise 7                      the fewest faults that still break it
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from tests.simulation.cluster_faults import Fault
from tests.simulation.cluster_history import ClusterHistory


class Outcome(NamedTuple):
    seed: int
    failure: str
    report: str
    trace: str
    cpu_s: float
    virtual_s: float
    counts: Counter[str]


def run_one(seed: int, kind: type[ClusterHistory] = ClusterHistory) -> Outcome:
    begin = time.process_time()
    failure = report = trace = ""
    history = kind(seed)
    try:
        trace = history.run()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}" if not isinstance(error, AssertionError) else str(error)
        report = "".join(traceback.format_exception(error))
    counts: Counter[str] = Counter(step.split()[1].partition("(")[0] for step in history.faults.steps)
    counts["events"] = history.world.events
    counts["records acknowledged"] = sum(producer.acknowledged for producer in history.producers)
    counts["records failed"] = sum(producer.failed for producer in history.producers)
    counts["records read"] = sum(consumer.read for consumer in history.consumers)
    counts["process starts"] = sum(node.host.starts for node in history.cluster.nodes.values())
    counts["leaders elected"] = history.elections
    return Outcome(seed, failure, report, trace, time.process_time() - begin, history.world.now - 1000, counts)


def still_breaks(kind: type[ClusterHistory], seed: int, faults: list[Fault], name: str) -> bool:
    try:
        kind(seed, faults).run()
    except Exception as error:
        return str(error).startswith(name)
    return False


def minimise(seed: int, kind: type[ClusterHistory] = ClusterHistory) -> list[Fault]:
    """Leave out faults, halves first, as long as the same invariant breaks."""
    history = kind(seed)
    faults = list(history.planned)
    try:
        history.run()
    except Exception as error:
        name = str(error).partition(":")[0]
    else:
        raise SystemExit(f"seed {seed} breaks nothing")
    size = max(1, len(faults) // 2)
    while True:
        start = 0
        while start < len(faults):
            fewer = faults[:start] + faults[start + size :]
            if still_breaks(kind, seed, fewer, name):
                faults = fewer
            else:
                start += size
        if size == 1:
            return faults
        size //= 2


def main(
    arguments: list[str] | None = None,
    kind: type[ClusterHistory] = ClusterHistory,
    description: str | None = __doc__,
) -> int:
    """`kind`: what a history is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--minimise", type=int)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--failures-max", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.minimise is not None:
        for fault in minimise(options.minimise, kind):
            print(fault)
        return 0
    return run_many(range(options.first, options.first + options.seeds), options, kind)


def run_many(seeds: range, options: Any, kind: type[ClusterHistory]) -> int:
    totals = Totals()
    gc.freeze()
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, initializer=_ignore_interrupts, maxtasksperchild=200) as pool:
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            for outcome in pool.imap_unordered(partial(run_one, kind=kind), seeds, chunksize=1):
                totals.add(outcome)
                if outcome.failure:
                    print(f"seed {outcome.seed}: {outcome.failure[:600]}", flush=True)
                    if options.verbose:
                        print(outcome.report, flush=True)
                    if len(totals.failures) >= options.failures_max:
                        print(f"given up after {len(totals.failures)} failures")
                        break
                if totals.done % 250 == 0:
                    print(f"... {totals.short()}", flush=True)
        except KeyboardInterrupt:
            print("stopped before the end")
        pool.terminate()
    totals.tell(seeds, options.jobs)
    return 1 if totals.failures else 0


class Totals:
    def __init__(self) -> None:
        self.begin = time.monotonic()
        self.failures: list[Outcome] = []
        self.done = 0
        self.cpu_s = self.virtual_s = 0.0
        self.counts: Counter[str] = Counter()
        self.slowest: list[tuple[float, int]] = []

    def add(self, outcome: Outcome) -> None:
        self.done += 1
        self.cpu_s += outcome.cpu_s
        self.virtual_s += outcome.virtual_s
        self.counts += outcome.counts
        self.slowest = sorted([*self.slowest, (outcome.cpu_s, outcome.seed)], reverse=True)[:5]
        if outcome.failure:
            self.failures.append(outcome)

    def short(self) -> str:
        elapsed = time.monotonic() - self.begin
        cpu_ms = 1000 * self.cpu_s / max(self.done, 1)
        return f"{self.done} histories, {len(self.failures)} broken, {elapsed:.0f} s, {cpu_ms:.0f} ms CPU each"

    def tell(self, seeds: range, jobs: int) -> None:
        virtual_s = self.virtual_s / max(self.done, 1)
        print(
            f"{self.short()} and {virtual_s:.1f} virtual s; seeds {seeds.start} to {seeds.stop - 1}, {jobs} processes"
        )
        print("slowest: " + ", ".join(f"seed {seed} {cpu:.1f} s" for cpu, seed in self.slowest))
        print(", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())))
        if self.failures:
            kinds = Counter(outcome.failure.partition(":")[0] for outcome in self.failures)
            print("broken: " + ", ".join(f"{name} {count}" for name, count in kinds.most_common()))
            print("seeds: " + " ".join(str(outcome.seed) for outcome in self.failures))


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
