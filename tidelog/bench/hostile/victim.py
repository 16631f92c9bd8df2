"""The client that must not notice: python -m tidelog.bench.hostile.victim PORT TOPIC, in a process of its own.

It produces a record of 200 B every few milliseconds, acks=all, and times each answer. For every line on its standard
input it prints what it saw since the last one, as JSON.
"""

from __future__ import annotations

import json
import select
import sys
import time

from tidelog.bench import frames
from tidelog.bench.raw import RawConnection

PACE_S = 0.005
VALUE_BYTES = 200


def main() -> None:
    port, topic = int(sys.argv[1]), sys.argv[2]
    batch = frames.record_batch([bytes(VALUE_BYTES)], int(time.time() * 1000))
    request = frames.produce(frames.ProducePlan(topic, {0: batch}), 1)
    latencies_ms: list[float] = []
    stdin_poll = select.poll()
    stdin_poll.register(sys.stdin, select.POLLIN)
    with RawConnection(port) as connection:
        while True:
            began = time.perf_counter()
            connection.send(request)
            connection.receive()
            took = time.perf_counter() - began
            latencies_ms.append(took * 1000)
            if stdin_poll.poll(max(0.0, PACE_S - took) * 1000):
                if not sys.stdin.readline():
                    return
                print(json.dumps(summary(latencies_ms)), flush=True)
                latencies_ms.clear()


def summary(latencies_ms: list[float]) -> dict[str, float]:
    ordered = sorted(latencies_ms)
    count = len(ordered)
    percentiles = {name: ordered[min(count - 1, int(count * part))] for name, part in (("p50", 0.5), ("p99", 0.99))}
    return {"count": count, **percentiles, "max": ordered[-1]}


if __name__ == "__main__":
    main()
