"""A consumer process for `latency`: how long each record took from its due time to its arrival.

`python -m tidelog.bench.studies.arrivals BOOTSTRAP TOPIC PARTITIONS RECORDS` prints `ready`, then
writes one int64 (nanoseconds, native order) per record to standard output. A record begins with the
time at which it was due, on the machine's monotonic clock.
"""

from __future__ import annotations

import struct
import sys
import time
from array import array

DUE = struct.Struct(">q")
_TIMEOUT_S = 60.0


def main(bootstrap: str, topic: str, partitions: int, records: int) -> None:
    from confluent_kafka import OFFSET_END, Consumer, TopicPartition

    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "arrivals", "enable.auto.commit": False, "log_level": 0}
    )
    latencies = array("q")
    try:
        for index in range(partitions):
            consumer.get_watermark_offsets(TopicPartition(topic, index), _TIMEOUT_S)
        consumer.assign([TopicPartition(topic, index, OFFSET_END) for index in range(partitions)])
        consumer.poll(0.5)
        print("ready", flush=True)
        clock, unpack, poll = time.monotonic_ns, DUE.unpack_from, consumer.poll
        last_s = time.monotonic()
        while len(latencies) < records and time.monotonic() - last_s < _TIMEOUT_S:
            message = poll(1.0)
            if message is not None and message.error() is None:
                latencies.append(clock() - unpack(message.value() or b"")[0])
                last_s = time.monotonic()
    finally:
        consumer.close()
    sys.stdout.buffer.write(latencies.tobytes())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
