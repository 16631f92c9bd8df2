"""Run many histories of a cluster on all the cores there are.

python -m tests.simulation.run_cluster --seeds 10000 --first 0 --jobs 2
python -m tests.simulation.run_cluster --first 7 --seeds 1 --verbose     the report of one history
python -m tests.simulation.run_cluster --minimise 7                      the fewest faults that still break it
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import traceback
from collections import Counter
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


def run_one(seed: int) -> Outcome:
    begin = time.process_time()
    failure = report = trace = ""
    history = ClusterHistory(seed)
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


def still_breaks(seed: int, faults: list[Fault], name: str) -> bool:
    try:
        ClusterHistory(seed, faults).run()
    except Exception as error:
        return str(error).startswith(name)
    return False


def minimise(seed: int) -> list[Fault]:
    """Leave out faults, halves first, as long as the same invariant breaks."""
    history = ClusterHistory(seed)
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
            if still_breaks(seed, fewer, name):
                faults = fewer
            else:
                start += size
        if size == 1:
            return faults
        size //= 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--minimise", type=int)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--failures-max", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.minimise is not None:
        for fault in minimise(options.minimise):
            print(fault)
        return 0
    return run_many(range(options.first, options.first + options.seeds), options)


def run_many(seeds: range, options: Any) -> int:
    begin = time.monotonic()
    gc.freeze()
    failures: list[Outcome] = []
    cpu_s = virtual_s = 0.0
    counts: Counter[str] = Counter()
    slowest: list[tuple[float, int]] = []
    done = 0
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, maxtasksperchild=200) as pool:
        for outcome in pool.imap_unordered(run_one, seeds, chunksize=1):
            done += 1
            cpu_s += outcome.cpu_s
            virtual_s += outcome.virtual_s
            counts += outcome.counts
            slowest = sorted([*slowest, (outcome.cpu_s, outcome.seed)], reverse=True)[:5]
            if outcome.failure:
                failures.append(outcome)
                print(f"seed {outcome.seed}: {outcome.failure[:600]}", flush=True)
                if options.verbose:
                    print(outcome.report, flush=True)
                if len(failures) >= options.failures_max:
                    print(f"given up after {len(failures)} failures")
                    pool.terminate()
                    break
            if done % 500 == 0:
                elapsed = time.monotonic() - begin
                print(f"... {done} histories, {elapsed:.0f} s, {1000 * cpu_s / done:.0f} ms CPU each", flush=True)
    elapsed = time.monotonic() - begin
    print(
        f"{done} histories (seeds {seeds.start} to {seeds.stop - 1}), {len(failures)} broken; {elapsed:.0f} s on "
        f"{options.jobs} processes, {1000 * cpu_s / max(done, 1):.0f} ms CPU and "
        f"{virtual_s / max(done, 1):.1f} virtual s each"
    )
    print("slowest: " + ", ".join(f"seed {seed} {cpu:.1f} s" for cpu, seed in slowest))
    print(", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    if failures:
        kinds = Counter(outcome.failure.partition(":")[0] for outcome in failures)
        print("broken: " + ", ".join(f"{name} {count}" for name, count in kinds.most_common()))
        print("seeds: " + " ".join(str(outcome.seed) for outcome in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
