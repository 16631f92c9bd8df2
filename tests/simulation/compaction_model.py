"""What a compacted log must be: a dict of the newest values, and every record that was ever appended to judge it by.

The compaction simulation keeps one beside the log it drives, and the invariants compare the two. No file, no segment,
no cleaner: a record is visible when its transaction is decided and not aborted, and nothing else is known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.simulation.storage_invariants import Broken, require
from tests.simulation.storage_model import AppendedBatch
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import decode_batch, iter_data_batches
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import Segment


class Kept(NamedTuple):
    key: bytes
    value: bytes | None
    timestamp: int


@dataclass(slots=True)
class KeyedBatch(AppendedBatch):
    """`records` of a batch of data, `appended_ms` when it was appended."""

    records: list[Kept] = field(default_factory=list)
    appended_ms: int = 0


@dataclass(slots=True)
class CompactedModel:
    """As `LogModel`; `delete_retention_ms` is how long a tombstone stays at least. `forgotten`: producer id -> where
    its last batch was cut, with which the cleaner may have superseded those before."""

    delete_retention_ms: int = 0
    batches: list[KeyedBatch] = field(default_factory=list)
    promised_end: int = 0
    kept_end: int = 0
    doubtful: KeyedBatch | None = None
    lowest_cut: int | None = None
    forgotten: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.batches[-1].next_offset if self.batches else 0

    def cut_from(self, offset: int) -> None:
        while self.batches and self.batches[-1].last_offset >= offset:
            batch = self.batches.pop()
            self.forgotten[batch.producer_id] = batch.base_offset
        self.promised_end = min(self.promised_end, self.end)

    def visible(self, log: PartitionLog) -> Iterator[tuple[int, Kept, int]]:
        """(offset, record, when it was appended) of what a read_committed reader of the whole history would see."""
        log_start, stable = log.log_start_offset, log.last_stable_offset
        open_batches: dict[int, list[KeyedBatch]] = {}
        aborted: set[int] = set()
        for batch in self.batches:
            if batch.ends is None:
                if batch.is_transactional:
                    open_batches.setdefault(batch.producer_id, []).append(batch)
            else:
                ended = open_batches.pop(batch.producer_id, [])
                aborted.update(each.base_offset for each in ended if batch.ends)
        for batch in self.batches:
            if batch.ends is None and batch.base_offset not in aborted:
                for number, record in enumerate(batch.records):
                    offset = batch.base_offset + number
                    if log_start <= offset < stable:
                        yield offset, record, batch.appended_ms

    def last_batches(self, log_start: int) -> dict[int, KeyedBatch]:
        """The last batch of data of each producer in its newest epoch."""
        found: dict[int, KeyedBatch] = {}
        for batch in self.batches:
            if batch.producer_id < 0:
                continue
            if batch.ends is None:
                found[batch.producer_id] = batch
            elif batch.producer_id in found and found[batch.producer_id].producer_epoch != batch.producer_epoch:
                del found[batch.producer_id]
        since = self.forgotten
        return {key: each for key, each in found.items() if each.base_offset >= max(log_start, since.get(key, 0))}


def read_committed(log: PartitionLog, max_bytes: int) -> list[tuple[int, Kept]]:
    """What a consumer gets, by fetches of `max_bytes`, from the log start to the last stable offset."""
    found: list[tuple[int, Kept]] = []
    offset, stable = log.log_start_offset, log.last_stable_offset
    data: list[bytes] = []
    while offset < stable:
        result = log.read(offset, max_bytes, stable)
        if result.next_offset <= offset:
            behind = log.read(offset, 1, log.log_end_offset)  # the bound may lie in a gap, or behind one
            if not behind.regions or read_header(behind.regions[0]).base_offset < stable:
                raise Broken(f"ReadsGoOn: a read at {offset} of a log that is stable up to {stable} gives nothing")
            break
        data.extend(bytes(region) for region in result.regions)
        offset = result.next_offset
    whole = b"".join(data)
    aborted = [(row.producer_id, row.first_offset) for row in log.aborted_transactions(log.log_start_offset, stable)]
    for position, header in iter_data_batches(whole, aborted):
        found += [(r.offset, Kept(r.key or b"", r.value, r.timestamp)) for r in decode_batch(whole, position, header)]
    return [(offset, record) for offset, record in found if offset >= log.log_start_offset]


class AcknowledgedRecordsArePresent:
    """What was promised is in the log."""

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        end, promised = log.log_end_offset, max(model.promised_end, model.kept_end)
        require(end >= promised, self, f"the log ends at {end}, {promised} was promised")
        ends = {batch.next_offset for batch in model.batches}
        require(end in ends or end <= log.log_start_offset, self, f"the log ends at {end}, no batch does")


class NothingIsInvented:
    """Every record that is read was appended at its offset, in this timeline, and was not aborted; in order."""

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        visible = {offset: record for offset, record, _ in model.visible(log)}
        found = read_committed(log, rng.choice((1, 200, 100_000)))
        offsets = [offset for offset, _ in found]
        require(offsets == sorted(set(offsets)), self, f"offsets {offsets}")
        for offset, record in found:
            require(visible.get(offset) == record, self, f"{record} at {offset}, appended was {visible.get(offset)}")


class EveryKeyKeepsItsNewest:
    """The newest value of a key is there, at its offset; a deletion is, until everybody had time to read it."""

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        found = dict(read_committed(log, 100_000))
        newest = {record.key: (offset, record, at) for offset, record, at in model.visible(log)}
        for key, (offset, record, appended_ms) in newest.items():
            if offset in found:
                continue
            where = f"{record} of offset {offset}, appended at {appended_ms}, is gone at {now_ms}"
            require(record.value is None, self, where)
            require(appended_ms + model.delete_retention_ms <= now_ms, self, where)
            back = [other for other, each in found.items() if each.key == key]
            require(not back, self, f"{key!r} was deleted at {offset}, and is back from {back}")


class TheCleanPartIsClean:
    """Below where the cleaner begins next no key is there twice."""

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        found = [(offset, each.key) for offset, each in read_committed(log, 100_000) if offset < log.cleaned_offset]
        keys = [key for _, key in found]
        require(len(keys) == len(set(keys)), self, f"cleaned up to {log.cleaned_offset}: {found}")
        require(log.cleaned_offset <= log.log_end_offset, self, f"{log.cleaned_offset} is past {log.log_end_offset}")


class SegmentsAreWhole:
    """Batches lie within their segments and are of the log's epochs, closed segments end where the next begins, and
    index rows are true.
    """

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        segments = list(log.segments)
        for number, segment in enumerate(segments):
            places: dict[int, int] = {}
            offset = segment.base_offset
            for position, header in headers(segment):
                places[header.last_offset] = position
                require(header.base_offset >= offset, self, f"{segment.path}: {header.base_offset} after {offset}")
                offset = header.next_offset
                known = log.leader_epochs.epoch_for_offset(max(header.base_offset, log.log_start_offset))
                is_known = known == header.partition_leader_epoch or offset <= log.log_start_offset
                require(is_known, self, f"{segment.path}: epoch {known} at {header.base_offset}")
            if number + 1 < len(segments):
                following = segments[number + 1].base_offset
                where = f"{segment.path} ends at {offset}, the next begins at {following}"
                require(offset == following or self.may_end_early(segment), self, where)
            for offset, position in segment.offset_index.rows():
                require(places.get(offset) == position, self, f"{segment.path}: row {offset} -> {position}")

    def may_end_early(self, segment: Segment) -> bool:
        return False


class NothingIsLeftBehind:
    """A start leaves no file of a cleaning that was cut short."""

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        names = [entry.name for entry in log.disk.list_directory(log.directory)]
        left = [name for name in names if name.endswith((".cleaned", ".swap"))]
        require(not left, self, f"{left}")


class ProducersAreRemembered:
    """The last batch of every producer is known for what it is when it is sent again, if its transaction is open."""

    def check(self, log: PartitionLog, model: CompactedModel, now_ms: int, rng: Random) -> None:
        for producer_id, batch in model.last_batches(log.log_start_offset).items():
            before = log.log_end_offset
            opened = log.producers.entries[producer_id].transaction_first_offset if batch.is_transactional else 0
            is_of_ended = batch.is_transactional and not 0 <= opened <= batch.base_offset
            try:
                info = log.append_as_leader(memoryview(bytearray(batch.sent)), batch.leader_epoch, now_ms)
            except KafkaError as error:
                if is_of_ended and error.code is ErrorCode.INVALID_TXN_STATE:
                    continue
                raise Broken(f"{type(self).__name__}: batch {batch.base_offset} of {producer_id}: {error}") from error
            is_known = info.duplicate and info.first_offset == batch.base_offset and log.log_end_offset == before
            is_known = is_known and not is_of_ended
            require(is_known, self, f"batch {batch.base_offset} of {producer_id} sent again gets {info}")


AT_REST = (
    NothingIsInvented(), EveryKeyKeepsItsNewest(), TheCleanPartIsClean(), ProducersAreRemembered(),
)  # fmt: skip
AFTER_A_START = (AcknowledgedRecordsArePresent(), NothingIsLeftBehind(), SegmentsAreWhole(), *AT_REST)
