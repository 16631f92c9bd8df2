"""One member of the demo's consumer group, a process of its own.

It counts and sums the flights that it reads until its parent stops it. Then it commits, leaves the group, and reports
its sums with the ranges of offsets that they come from. With these the parent proves that the members together have
read each record once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from tidelog import Consumer
from tidelog.bench.demo.events import emit
from tidelog.bench.demo.tally import Tallies, Tally, to_json
from tidelog.client import ConsumerRecord

_REPORT_EVERY_S = 0.1
_POLL_MS = 50


class Reader:
    """What this member has seen: tallies; for every partition its first offset, the next one, and the records."""

    def __init__(self) -> None:
        self.tallies: Tallies = {}
        self.ranges: dict[int, list[int]] = {}
        self.records = 0

    def take(self, partition: int, records: Sequence[ConsumerRecord]) -> None:
        span = self.ranges.setdefault(partition, [records[0].offset, records[0].offset, 0])
        for record in records:
            flight = json.loads(record.value or b"null")
            carrier = (record.key or b"").decode()
            tally = self.tallies.get(carrier)
            if tally is None:
                tally = self.tallies[carrier] = Tally()
            tally.add(flight["arr_delay"], flight["distance"])
        span[1] = records[-1].offset + 1
        span[2] += len(records)
        self.records += len(records)


async def told_to_stop() -> None:
    """Returns when the parent says "stop" or is gone."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await reader.readline()


async def consume(bootstrap: str, topic: str, group: str) -> None:
    reader = Reader()
    stop = asyncio.ensure_future(told_to_stop())
    assigned: list[int] = []
    reported_at = 0.0
    async with Consumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:
        while not stop.done():
            batches = await consumer.poll(timeout_ms=_POLL_MS, max_records=5000)
            for partition, records in batches.items():
                reader.take(partition.partition, records)
            now = time.monotonic()
            partitions = sorted(partition.partition for partition in consumer.assignment())
            if partitions != assigned:
                assigned = partitions
                emit("assigned", partitions=assigned)
            if now - reported_at > _REPORT_EVERY_S:
                reported_at = now
                emit("progress", records=reader.records)
        await consumer.commit()
    emit("done", records=reader.records, ranges=reader.ranges, tallies=to_json(reader.tallies))


if __name__ == "__main__":
    asyncio.run(consume(*sys.argv[1:4]))
