"""What readers of committed records see of a replica, whatever is damaged: no aborted record, and each committed one
that is not reported as damaged, or superseded and cleaned away.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from tests.simulation.compaction_model import CompactedModel, Kept, KeyedBatch
from tests.simulation.repaired_replica import Replica
from tests.simulation.storage_invariants import Broken
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import decode_batch, iter_data_batches
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.reader import headers


class Appended(NamedTuple):
    """`is_aborted`: None while its transaction is open."""

    record: Kept
    is_transactional: bool
    is_aborted: bool | None
    at_ms: int


class Readers:
    def __init__(self, model: CompactedModel, rng: Random) -> None:
        self.model = model
        self.rng = rng

    def require(
        self, replica: Replica, where: str, high_watermark: int, now_ms: int, *, is_damaged: bool, may_be_back: bool
    ) -> None:
        """Raises Broken. `is_damaged`: reads of the replica may fail. `may_be_back`: a key that was deleted."""
        log, appended = replica.log, self.appended()
        offset, end = log.log_start_offset, log.last_stable_offset
        shown: dict[int, Kept] = {}
        hidden: list[tuple[int, int]] = []
        max_bytes = self.rng.choice((1, 200, 100_000))
        while offset < end:
            try:
                bound = replica.committed_bound(offset)
                if offset >= bound:
                    break
                data, result = replica.read(offset, max_bytes, bound)
                rows = log.aborted_transactions(offset, result.next_offset)
            except DamagedRecords as error:
                if not is_damaged:
                    raise Broken(f"NothingIsDamaged: {where}: {error}") from error
                after = max(offset + 1, error.damage.end_offset)
                hidden.append((offset, after))
                offset = after
                continue
            if result.next_offset <= offset:
                if is_removed(log, offset, bound):
                    break
                raise Broken(f"ReadsGoOn: {where}: a read at {offset} of {end} gives nothing")
            visible = records_in(data, offset, [(row.producer_id, row.first_offset) for row in rows])
            shown |= visible
            for at, record in records_in(data, offset, []).items():
                known = appended.get(at)
                if known is None or record != known.record:
                    raise Broken(f"NothingIsInvented: {where}: {record} at {at}, not {known}")
                if replica.lowest_cut is not None and known.is_transactional:
                    continue  # a start takes a marker that is to be cut for replicated, as in Kafka
                if (at in visible) == (known.is_aborted is not False):
                    what = "shown" if at in visible else "hidden"
                    raise Broken(f"CommittedRecordsAreRead: {where}: {at} is {what}, aborted: {known.is_aborted}")
            offset = result.next_offset
        if is_damaged:
            hidden.append((offset, end))  # a transaction may be open there, of which damage hides the end
        committed = [
            (at, each) for at, each in sorted(appended.items())
            if log.log_start_offset <= at < max(end, high_watermark) and each.is_aborted is False
        ]  # fmt: skip
        newest = {each.record.key: (at, each) for at, each in committed}
        for key, (at, each) in newest.items():
            if at < end and at not in shown and not any(first <= at < after for first, after in hidden):
                is_due = each.record.value is None and each.at_ms + self.model.delete_retention_ms <= now_ms
                if not is_due:
                    raise Broken(f"EveryKeyKeepsItsNewest: {where}: {each.record} of {at} is gone")
                if not may_be_back:
                    require_deleted(key, at, shown, where)

    def appended(self) -> dict[int, Appended]:
        """Each record by its offset."""
        found: dict[int, Appended] = {}
        open_batches: dict[int, list[KeyedBatch]] = {}
        for batch in self.model.batches:
            if batch.ends is not None:
                for each in open_batches.pop(batch.producer_id, []):
                    found |= of_batch(each, batch.ends)
            else:
                found |= of_batch(batch, None if batch.is_transactional else False)
                if batch.is_transactional:
                    open_batches.setdefault(batch.producer_id, []).append(batch)
        return found


def require_deleted(key: bytes, deleted_at: int, shown: Mapping[int, Kept], where: str) -> None:
    back = [at for at, each in shown.items() if each.key == key and each.value is not None]
    if back:
        raise Broken(f"DeletedKeysStayDeleted: {where}: {key!r}, deleted at {deleted_at}, is back from {back}")


def of_batch(batch: KeyedBatch, is_aborted: bool | None) -> dict[int, Appended]:
    return {
        batch.base_offset + number: Appended(record, batch.is_transactional, is_aborted, batch.appended_ms)
        for number, record in enumerate(batch.records)
    }


def is_removed(log: PartitionLog, offset: int, bound: int) -> bool:
    """Whether the cleaner has removed all up to the bound, which is lower again after a start."""
    for segment in log.segments.from_offset(offset):
        for _, header in headers(segment):
            if header.last_offset >= offset:
                return header.base_offset >= bound
    return True


def records_in(data: bytes, from_offset: int, aborted: list[tuple[int, int]]) -> dict[int, Kept]:
    """The records of data, but those that a consumer drops that knows of these aborted transactions."""
    found: dict[int, Kept] = {}
    batches = iter_data_batches(data, aborted) if aborted else iter_headers(data)
    for position, header in batches:
        if not header.is_control:
            for each in decode_batch(data, position, header):
                if each.offset >= from_offset:
                    found[each.offset] = Kept(each.key or b"", each.value, each.timestamp)
    return found


def require_whole_segments(log: PartitionLog) -> None:
    """The batches are of the leader epochs that the log has, and no damage is between them."""
    for number, segment in enumerate(log.segments):
        if segment.damage or segment.base_offset < log.log_start_offset:
            continue  # records that are deleted may be damaged
        offset = segment.base_offset
        for _, header in headers(segment):
            if header.base_offset < offset:
                raise Broken(f"SegmentsAreWhole: {segment.path}: {header.base_offset} after {offset}")
            offset = header.next_offset
            known = log.leader_epochs.epoch_for_offset(max(header.base_offset, log.log_start_offset))
            if known != header.partition_leader_epoch and offset > log.log_start_offset:
                raise Broken(f"LeaderEpochsAreRight: {segment.path}: epoch {known} at {header.base_offset}")
        following = log.log_end_offset if segment is log.segments.active else log.segments[number + 1].base_offset
        if offset != following and not (segment.may_end_early and offset < following):
            raise Broken(f"SegmentsAreWhole: {segment.path} ends at {offset}, the next begins at {following}")
