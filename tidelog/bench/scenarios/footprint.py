"""The cost of an idle node: start to ready, idle memory, idle CPU. A fresh node each round."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tidelog.bench.clusters import RunningCluster
from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario

_SETTLE_S = 4.0
_WATCH_S = 5.0


class Footprint(Scenario):
    """Ready means that Metadata is answered, with every broker in it; formatting, where it is a step, comes before."""

    def __init__(self, name: str, title: str, *, brokers: int, targets: tuple[float, float, float]) -> None:
        super().__init__(name, title, brokers)
        ready_s, memory_mib, cpu_ms = targets
        self.metrics = (
            Metric("start to ready", "s", at_most=ready_s, ratio_at_most=1.0),
            Metric("idle memory", "MiB", at_most=memory_mib, ratio_at_most=1.0),
            Metric("idle cpu", "ms/s", at_most=cpu_ms, ratio_at_most=1.0),
        )

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        directory = Path(tempfile.mkdtemp(dir=contestant.scratch))
        with RunningCluster(contestant.fresh(directory)) as running:
            servers = list(running.cluster.nodes.values())
            time.sleep(_SETTLE_S)
            began = time.monotonic()
            with CpuMeter(servers) as meter:
                time.sleep(max(_WATCH_S * scale, 2.0))
            watched_s = time.monotonic() - began
            return {
                "start to ready": running.ready_s,
                "idle memory": sum(server.usage().rss_mib for server in servers),
                "idle cpu": meter.used_ns / 1e6 / watched_s,
            }


def scenarios() -> list[Scenario]:
    return [
        Footprint("footprint", "fresh node", brokers=1, targets=(0.4, 60, 5)),
        Footprint("rf3-footprint", "three fresh nodes together", brokers=3, targets=(2.0, 200, 30)),
    ]
