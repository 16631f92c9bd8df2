"""A group member in a process of its own, for `assignors`: Tidelog's client, which knows all four assignors.

`python -m tidelog.bench.studies.member BOOTSTRAP GROUP ASSIGNOR TOPIC[,TOPIC...]` prints one line
of JSON every `SAMPLE_S` seconds: the monotonic time, the records read, the CPU seconds used, the
partitions assigned. It leaves the group and ends on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time

from tidelog.client import Consumer

SAMPLE_S = 0.5
_POLL_MS = 100


async def main(bootstrap: str, group: str, assignor: str, topics: list[str]) -> None:
    is_ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_ending.set)
    async with Consumer(
        bootstrap_servers=bootstrap,
        group_id=group,
        partition_assignment_strategy=assignor,
        auto_offset_reset="earliest",
        session_timeout_ms=6000,
        heartbeat_interval_ms=500,
    ) as consumer:
        consumer.subscribe(topics)
        records, next_s = 0, time.monotonic()
        while not is_ending.is_set():
            fetched = await consumer.poll(_POLL_MS)
            records += sum(map(len, fetched.values()))
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + SAMPLE_S
                assigned = sorted(f"{each.topic}-{each.partition}" for each in consumer.assignment())
                sample = {"time_s": now_s, "records": records, "cpu_s": time.process_time(), "assigned": assigned}
                print(json.dumps(sample), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4].split(",")))
