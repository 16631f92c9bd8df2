"""What an append and a read cost, in CPU microseconds: python -m tests.unit.storage.measure_log [DIRECTORY].

Each figure is the median of several rounds, on a file whose pages were written and given back before, less the cost of
the loop and of preparing the batch. The budget: 7 us for 200 bytes, 12 us for 16 KB, 6 us for a
read at the tail.
"""

from __future__ import annotations

import shutil
import statistics
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

from tests.unit.storage.batches import NOW, TOPIC_ID
from tidelog.protocol.batches.record_batch import write_crc
from tidelog.protocol.batches.records import encode_batch
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig

ROUNDS = 5
SEQUENCE_AT = 53
pack_sequence = struct.Struct(">i").pack_into
pack_offset = struct.Struct(">q").pack_into


def microseconds(action: Callable[[], None], count: int) -> float:
    began = process_time()
    action()
    return (process_time() - began) / count * 1e6


def measure(folder: Path, size_bytes: int, count: int, idempotent: bool) -> None:
    records = max(1, size_bytes // 1000)
    value = b"v" * ((size_bytes - 61) // records - 10)
    producer: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0} if idempotent else {}
    batch = bytearray(encode_batch([(NOW, None, value, ())] * records, **producer))
    view, template = memoryview(batch), bytes(batch)
    directory = LogDirectory.open(OsDisk(), str(folder), node_id=1, cluster_id=None)
    directory.load(lambda topic: LogConfig(), NOW)
    appends: list[float] = []
    reads: list[float] = []
    scans: list[float] = []
    for number in range(ROUNDS):
        log = directory.create_log(f"t{size_bytes}{idempotent}", number, TOPIC_ID, LogConfig(), NOW)
        file = log.segments.active.file
        file.write_at(bytes(len(batch) * count), 0)
        file.truncate(0)

        def prepare(sequence: int) -> None:
            batch[:] = template
            if idempotent:
                pack_sequence(batch, SEQUENCE_AT, sequence)
                write_crc(batch, 0, len(batch))

        def append(log: PartitionLog = log) -> None:
            for sequence in range(0, count * records, records):
                prepare(sequence)
                log.append_as_leader(view, 3, NOW)

        def only_prepare() -> None:
            for sequence in range(0, count * records, records):
                prepare(sequence)

        def tail(log: PartitionLog = log) -> None:
            end = log.log_end_offset
            for _ in range(20_000):
                log.read(end - records, 1 << 20, end)

        def scan(log: PartitionLog = log) -> None:
            end, offset = log.log_end_offset, 0
            for _ in range(1000):
                found = log.read(offset, 1 << 20, end).next_offset
                offset = found if found < end else 0

        appends.append(microseconds(append, count) - microseconds(only_prepare, count))
        reads.append(microseconds(tail, 20_000))
        scans.append(microseconds(scan, 1000))
    directory.close()
    kind = "idempotent" if idempotent else "plain"
    print(
        f"{len(batch):6} B {kind:10}  append {statistics.median(appends):6.2f}   read of the last batch "
        f"{statistics.median(reads):5.2f}   reads of 1 MB, one after the other {statistics.median(scans):6.2f}   us"
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="tidelog-measure-"))
    for size_bytes, count in ((200, 20_000), (16_384, 3000)):
        for idempotent in (False, True):
            target = folder / f"{size_bytes}-{idempotent}"
            measure(target, size_bytes, count, idempotent)
            shutil.rmtree(target)


if __name__ == "__main__":
    main()
