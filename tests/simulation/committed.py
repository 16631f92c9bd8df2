"""What has ever been committed, as the simulation has seen it: one history per partition and one of the metadata.

Whenever a replica says that its high watermark is somewhere, the batches below it are noted here or compared with what
is noted. Invariant: what was noted once is never changed; a replica that disagrees is broken.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.world import Broken
from tests.unit.storage.batches import read
from tidelog.protocol.batches.record_batch import read_header
from tidelog.storage.log.partition_log import PartitionLog

READ_BYTES = 1 << 20


class Batch(NamedTuple):
    base_offset: int
    last_offset: int
    leader_epoch: int
    crc: int


def batches(log: PartitionLog, start: int, end: int) -> list[Batch]:
    """Those that end above `start` and begin below `end`."""
    found: list[Batch] = []
    offset = max(start, log.log_start_offset)
    while offset < end:
        result = read(log, offset, READ_BYTES, end)  # examines a segment that no reader has asked for since it changed
        if not result.size_bytes or result.next_offset <= offset:
            raise Broken(f"LogsCanBeRead: nothing at {offset} of {log!r}, which ends at {log.log_end_offset}")
        for region in result.regions:
            data, position = bytes(region), 0
            while position < len(data):
                header = read_header(data, position)
                found.append(
                    Batch(header.base_offset, header.next_offset - 1, header.partition_leader_epoch, header.crc)
                )
                position += header.size_bytes
        offset = result.next_offset
    return found


class CommittedLog:
    """`name` says of what. Offsets below `end` are committed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.end = 0
        self.by_base_offset: dict[int, Batch] = {}

    def observe(self, log: PartitionLog, start: int, high_watermark: int, who: str, invariant: str) -> None:
        """A replica holds that everything below `high_watermark` is committed; from `start` on it is looked at."""
        known = self.by_base_offset
        for batch in batches(log, start, high_watermark):
            noted = known.get(batch.base_offset)
            if noted is None:
                if batch.base_offset < self.end:
                    self._disagree(invariant, batch, who)
                known[batch.base_offset] = batch
            elif noted != batch:
                self._disagree(invariant, batch, who)
        if high_watermark > self.end:
            self.end = high_watermark

    def _disagree(self, invariant: str, batch: Batch, who: str) -> None:
        noted = [each for each in self.by_base_offset.values() if each.last_offset >= batch.base_offset]
        noted = sorted(each for each in noted if each.base_offset <= batch.last_offset)
        raise Broken(f"{invariant}: {self.name}: {who} has {batch} where {noted or 'nothing'} was committed")
