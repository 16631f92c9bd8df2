"""Random transactions of several clients against real brokers, every history judged.

python -m tests.transactions.run --histories 100 --seed 7 --faults none --clients confluent
python -m tests.transactions.run --server kafka --brokers 3 --faults kill,pause,cut --minutes 120

A history that breaks a rule is printed whole and kept in the directory of `--keep`.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.transactions.history import Outcome, Poll, Send
from tests.transactions.real_history import MAKERS, RealHistory
from tests.transactions.servers import FAULTS, Faults, running_cluster
from tidelog.testing.cluster import EmbeddedCluster


class Totals:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.began = time.monotonic()

    def add(self, history: RealHistory, faults: Faults) -> None:
        counts = self.counts
        counts["histories"] += 1
        counts["faults"] += sum(what.split()[0] in (*FAULTS, "stop") for _, what in faults.log)
        for operation in history.history.operations:
            if operation.outcome is Outcome.PLAIN and not any(operation.sends()):
                continue
            counts[f"operations {operation.outcome.value}"] += 1
            counts["transactions with offsets"] += bool(operation.offsets)
            for step in operation.steps:
                if isinstance(step, Send):
                    counts["sends"] += 1
                elif isinstance(step, Poll):
                    counts["records polled"] += len(step.records)

    def __str__(self) -> str:
        parts = [f"{name} {count}" for name, count in sorted(self.counts.items())]
        broken = ", ".join(f"{kind} {count}" for kind, count in self.broken.most_common()) or "nothing"
        return f"{', '.join(parts)}; broken: {broken}; {time.monotonic() - self.began:.0f} s"


def run_histories(
    cluster: EmbeddedCluster, totals: Totals, *, seeds: Sequence[int], faults: Sequence[str], clients: Sequence[str],
    minutes: float | None = None, keep: Path | None = None,
) -> None:  # fmt: skip
    """One after another, a topic for each; stops when the time is over."""
    deadline = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    for seed in seeds:
        if time.monotonic() > deadline:
            return
        history = RealHistory(
            cluster.bootstrap_servers, f"history-{seed}", seed, clients,
            replicas=min(3, len(cluster.broker_ids)), is_patient=bool(faults),
        )  # fmt: skip
        history.create_topics()
        topics = (history.topics.topic, history.topics.input_topic)
        striking = Faults(cluster, faults, random.Random(seed), topics)
        striking.start()
        try:
            history.run(work_s=40.0)
        finally:
            striking.end()
        anomalies = history.judge()
        totals.add(history, striking)
        if anomalies:
            totals.broken.update(anomaly.kind.value for anomaly in anomalies)
            tell(history, striking, [str(anomaly) for anomaly in anomalies], keep)
        if totals.counts["histories"] % 10 == 0:
            print(totals, flush=True)


def tell(history: RealHistory, faults: Faults, anomalies: list[str], keep: Path | None) -> None:
    lines = [f"seed {history.seed}:", *anomalies[:30], "", str(history.history), ""]
    lines += [f"{at:.3f} {what}" for at, what in faults.log]
    print("\n".join(lines[: 31 if keep is not None else None]), flush=True)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"history-{history.seed}.txt").write_text("\n".join(lines))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first history")
    parser.add_argument("--server", choices=["tidelog", "kafka"], default="tidelog")
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--faults", default="none", help=f"none, or some of {','.join(FAULTS)}")
    parser.add_argument("--clients", default="confluent", help=f"some of {','.join(MAKERS)}")
    parser.add_argument("--transaction-version", type=int)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--keep", type=Path, help="where histories are kept that break a rule")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the nodes end too
    faults = [] if options.faults == "none" else options.faults.split(",")
    totals = Totals()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        version = options.transaction_version
        with running_cluster(options.server, Path(directory), options.brokers, version, faults) as cluster:
            try:
                run_histories(
                    cluster, totals, seeds=range(options.seed, options.seed + options.histories), faults=faults,
                    clients=options.clients.split(","), minutes=options.minutes, keep=options.keep,
                )  # fmt: skip
            finally:
                print(totals, flush=True)
    return 1 if totals.broken else 0


if __name__ == "__main__":
    sys.exit(main())
