"""What a node costs before it does anything: start to ready, idle memory, idle CPU. A fresh node each round."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tidelog.bench.scenarios.base import Contestant, CpuMeter, Metric, Scenario

_SETTLE_S = 4.0
_WATCH_S = 5.0


class Footprint(Scenario):
    """Ready means that Metadata is answered; formatting, where it is a step of its own, comes before."""

    metrics = (
        Metric("start to ready", "s", at_most=0.4, ratio_at_most=1.0),
        Metric("idle memory", "MiB", at_most=60, ratio_at_most=1.0),
        Metric("idle cpu", "ms/s", at_most=5, ratio_at_most=1.0),
    )

    def __init__(self) -> None:
        super().__init__("footprint", "fresh node")

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        directory = Path(tempfile.mkdtemp(dir=contestant.scratch))
        with contestant.fresh(directory) as server:
            time.sleep(_SETTLE_S)
            began = time.monotonic()
            with CpuMeter(server) as meter:
                time.sleep(max(_WATCH_S * scale, 2.0))
            watched_s = time.monotonic() - began
            return {
                "start to ready": server.ready_s,
                "idle memory": server.usage().rss_mib,
                "idle cpu": meter.used_ns / 1e6 / watched_s,
            }


def scenarios() -> list[Scenario]:
    return [Footprint()]
