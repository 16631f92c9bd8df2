"""python -m tidelog.bench.hostile: every attack in turn on one node, and a table of what another client noticed.

The node is a process of its own, and so is that client; the attacker is this one. Memory is the node's resident set,
the largest seen while the attack went on. With --kafka the same against Apache Kafka.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tidelog.bench import frames, topics
from tidelog.bench.hostile.attacks import ATTACKS, COMPACTED, TOPIC
from tidelog.bench.hostile.groups import thousand_groups
from tidelog.bench.hostile.large_requests import LARGE_REQUESTS
from tidelog.bench.keeping import INTERRUPTED, signals_as_interrupt
from tidelog.bench.raw import RawConnection
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerProcess, TidelogProcess
from tidelog.testing.usage import rss_bytes

VICTIMS_TOPIC = "victim"
ALL = {**ATTACKS, **LARGE_REQUESTS, "a thousand groups": thousand_groups}
FILL_BYTES = 8 << 20
SAMPLE_S = 0.1
CALM_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Latencies in ms of the client beside it, memory in MiB before and at most."""

    attack: str
    saw: str
    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    before_mib: float
    most_mib: float


class Victim:
    """The client that must not notice."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "tidelog.bench.hostile.victim", str(port), VICTIMS_TOPIC]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def mark(self) -> dict[str, float]:
        """What it saw since the last mark."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seen: dict[str, float] = json.loads(self._process.stdout.readline())
        return seen

    def stop(self) -> None:
        try:
            self._process.communicate(timeout=10)
        finally:
            self._process.kill()
            self._process.wait()


async def under_attack(server: ServerProcess, victim: Victim, name: str, seconds: float) -> Outcome:
    await asyncio.sleep(CALM_S)
    before = most = rss_bytes(server.pid)
    victim.mark()
    attack = asyncio.ensure_future(ALL[name](server.port, seconds))
    while not attack.done():
        await asyncio.wait([attack], timeout=SAMPLE_S)
        most = max(most, rss_bytes(server.pid))
    seen = await asyncio.to_thread(victim.mark)
    return Outcome(
        name, attack.result(), int(seen["count"]), seen["p50"], seen["p99"], seen["max"], before / 2**20, most / 2**20
    )


def prepare(port: int) -> None:
    """The topics, and enough records to fetch."""
    topics.create(
        port,
        [
            topics.NewTopic(TOPIC, 1, 1),
            topics.NewTopic(VICTIMS_TOPIC, 1, 1),
            topics.NewTopic(COMPACTED, 1, 1, {"cleanup.policy": "compact"}),
        ],
    )
    batch = frames.record_batch([bytes(900_000)], int(time.time() * 1000))
    with RawConnection(port) as connection:
        for _ in range(FILL_BYTES // len(batch)):
            connection.send(frames.produce(frames.ProducePlan(TOPIC, {0: batch}), 1))
            connection.receive()


def run(server: ServerProcess, names: list[str], seconds: float) -> list[Outcome]:
    prepare(server.port)
    victim = Victim(server.port)
    try:
        rows = []
        for name in names:
            rows.append(asyncio.run(under_attack(server, victim, name, seconds)))
            print(shown(rows[-1]), flush=True)
        return rows
    finally:
        victim.stop()


HEAD = "| attack | p50, ms | p99, ms | max, ms | memory before, MiB | at most | |\n|---|---:|---:|---:|---:|---:|---|"


def shown(one: Outcome) -> str:
    latencies = " | ".join(f"{value:.2f}" for value in (one.p50_ms, one.p99_ms, one.max_ms))
    return f"| {one.attack} | {latencies} | {one.before_mib:.0f} | {one.most_mib:.0f} | {one.saw} |"


def main() -> int:
    """Exits with `INTERRUPTED` on Ctrl-C, SIGTERM and SIGHUP; the lines of the attacks until then are printed."""
    try:
        with signals_as_interrupt():
            return _main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tidelog.bench.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--attack", action="append", choices=list(ALL), help="only this one; may be repeated")
    parser.add_argument("--kafka", action="store_true", help="Apache Kafka instead of Tidelog")
    parser.add_argument("--override", "-o", action="append", default=[], metavar="KEY=VALUE", help="of the node")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    options = {"group.initial.rebalance.delay.ms": "0", **dict(each.split("=", 1) for each in arguments.override)}
    with tempfile.TemporaryDirectory(prefix="tidelog-hostile-") as directory:
        kind: type[ServerProcess] = TidelogProcess
        if arguments.kafka:
            from tidelog.bench.peers import KafkaProcess

            kind = KafkaProcess
        print(HEAD)
        with kind(Path(directory), free_port(), options) as server:
            run(server, arguments.attack or list(ALL), arguments.seconds)
            print(server.output_tail(3000), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
