"""The cost of cleaning a keyed topic: CPU and time from the change of its policy until its closed segments are clean.

The topic is filled before, by librdkafka, with keys drawn at random; then cleanup.policy turns to compact and the
cleaner, which looks for work ten times a second, does all of it in one round. The start of the cleaner counts, what it
writes is synced by either broker. Done is when cleaner-offset-checkpoint says so.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import GIGABYTE, MEGABYTE, Contestant, CpuMeter, Metric, Scenario, topic
from tidelog.testing.usage import warm_pages

_SEGMENT_BYTES: Final = 32 * 1024 * 1024
_SETTINGS: Final = {"segment.bytes": str(_SEGMENT_BYTES), "min.cleanable.dirty.ratio": "0.001"}
_BACKOFF_MS: Final = "100"
_TIMEOUT_S: Final = 180.0
_KEY_BYTES: Final = 16


class Compaction(Scenario):
    """`size_bytes` of values of `value_bytes` under `keys` keys."""

    metrics = (
        Metric("cpu", "s/GB", ratio_at_most=1.0),
        Metric("time", "s/GB", ratio_at_most=1.0),
        Metric("speed", "MB/s"),
        Metric("left", "%"),
    )

    def __init__(self, name: str, title: str, *, value_bytes: int, keys: int, size_bytes: int, codec: str) -> None:
        super().__init__(name, title)
        self.value_bytes, self.keys, self.size_bytes, self.codec = value_bytes, keys, size_bytes, codec

    def warm(self, contestant: Contestant, scale: float) -> None:
        self.measure(contestant, 0.6)

    def measure(self, contestant: Contestant, scale: float) -> dict[str, float]:
        size_bytes = max(int(self.size_bytes * scale), 3 * _SEGMENT_BYTES)
        server = contestant.server
        with _looking_often(contestant), topic(contestant, 1, settings=_SETTINGS) as its:
            self._fill(contestant, its.name, size_bytes)
            folder = server.data_directory / f"{its.name}-0"
            closed = sorted(folder.glob("*.log"))[:-1]
            before = sum(path.stat().st_size for path in closed)
            warm_pages(before)
            began = time.perf_counter()
            with CpuMeter([server]) as meter:
                _alter(contestant, "TOPIC", its.name, "cleanup.policy", "compact")
                _await_cleaned(server.data_directory, its.name)
            took_s = time.perf_counter() - began
            left = sum(path.stat().st_size for path in sorted(folder.glob("*.log"))[:-1])
        return {
            "cpu": meter.used_ns / 1e9 / before * GIGABYTE,
            "time": took_s / before * GIGABYTE,
            "speed": before / MEGABYTE / took_s,
            "left": 100 * left / before,
        }

    def _fill(self, contestant: Contestant, name: str, size_bytes: int) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {
                "bootstrap.servers": contestant.cluster.bootstrap_servers,
                "acks": "all",
                "linger.ms": 20,
                "log_level": 0,
                "compression.type": self.codec,
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        rng = random.Random(7)
        noise = rng.randbytes(1 << 20)
        last = len(noise) - self.value_bytes
        for _ in range(size_bytes // (self.value_bytes + _KEY_BYTES)):
            start = rng.randrange(last)
            key = b"%0*d" % (_KEY_BYTES, rng.randrange(self.keys))
            while True:
                try:
                    producer.produce(name, noise[start : start + self.value_bytes], key)
                    break
                except BufferError:
                    producer.poll(0.05)
        if producer.flush(60):
            raise BenchError("the topic could not be filled")


@contextmanager
def _looking_often(contestant: Contestant) -> Iterator[None]:
    _alter(contestant, "BROKER", "1", "log.cleaner.backoff.ms", _BACKOFF_MS)
    try:
        yield
    finally:
        _alter(contestant, "BROKER", "1", "log.cleaner.backoff.ms", None)


def _alter(contestant: Contestant, kind: str, name: str, key: str, value: str | None) -> None:
    from confluent_kafka import admin as kafka_admin

    module: Any = kafka_admin  # the package does not declare all it has
    operation = module.AlterConfigOpType.SET if value is not None else module.AlterConfigOpType.DELETE
    entry = module.ConfigEntry(key, value or "", incremental_operation=operation)
    resource = module.ConfigResource(module.ResourceType[kind], name, incremental_configs=[entry])
    admin = module.AdminClient({"bootstrap.servers": contestant.cluster.bootstrap_servers, "log_level": 0})
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(20)


def _await_cleaned(data: Path, name: str) -> None:
    active = max(int(path.stem) for path in (data / f"{name}-0").glob("*.log"))
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(0.01)
        try:
            lines = (data / "cleaner-offset-checkpoint").read_text().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            its, _, offset = line.partition(" ")
            if its == name and int(offset.split()[-1]) >= active:
                return
    raise BenchError(f"{name} was not cleaned up to {active} in {_TIMEOUT_S:.0f} s")


def scenarios() -> list[Scenario]:
    return [
        Compaction(
            "compaction-1kb", "compaction, 1 KB, 20,000 keys", value_bytes=1000, keys=20_000, size_bytes=400_000_000,
            codec="none",
        ),
        Compaction(
            "compaction-100b", "compaction, 100 B, 100,000 keys", value_bytes=100, keys=100_000, size_bytes=200_000_000,
            codec="none",
        ),
        Compaction(
            "compaction-zstd", "compaction, 100 B zstd, 100,000 keys", value_bytes=100, keys=100_000,
            size_bytes=200_000_000, codec="zstd",
        ),
    ]  # fmt: skip
