"""What must hold of a log whenever it was opened: one named class per promise.

Each is given the log and the model of it, changes nothing that matters, and raises `Broken` with what it saw. They are
the vocabulary of the storage simulation; a planted bug must be caught by the one that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Protocol

from tests.simulation.storage_model import AppendedBatch, LogModel
from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.reader import Examination, headers


class Broken(AssertionError):
    """An invariant does not hold; the message begins with its name."""


class Invariant(Protocol):
    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None: ...


def require(condition: bool, invariant: object, message: str) -> None:
    if not condition:
        raise Broken(f"{type(invariant).__name__}: {message}")


def read_all(log: PartitionLog, max_bytes: int) -> bytes:
    """Every byte from the log start to the log end, in reads of `max_bytes`."""
    parts: list[bytes] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            result = log.read(offset, max_bytes, log.log_end_offset)
        except (Examination, DamagedRecords) as error:  # nothing is ever damaged here, so what is missing is lost
            raise Broken(f"{LogIsAPrefixOfWhatWasAppended.__name__}: a read at {offset}: {error}") from None
        if not result.size_bytes or result.next_offset <= offset:
            where = f"a read at {offset} of a log that ends at {log.log_end_offset}"
            raise Broken(f"{LogIsAPrefixOfWhatWasAppended.__name__}: {where} gives nothing")
        parts.extend(bytes(region) for region in result.regions)
        offset = result.next_offset
    return b"".join(parts)


class AcknowledgedRecordsArePresent:
    """What was promised is in the log."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        end, promised = log.log_end_offset, max(model.promised_end, model.kept_end)
        require(end >= promised, self, f"the log ends at {end}, {promised} was promised")


class LogIsAPrefixOfWhatWasAppended:
    """Every byte is what was appended at its place, in this timeline; the log ends at the end of a batch of it."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        expected = [batch for batch in model.batches if batch.last_offset >= log.log_start_offset]
        end = log.log_end_offset
        retained = [batch for batch in expected if batch.last_offset < end]
        ends = {batch.next_offset for batch in model.batches} | {model.log_start, log.log_start_offset}
        require(end in ends, self, f"the log ends at {end}, no batch does")
        found = read_all(log, rng.choice((1, 300, 100_000)))
        wanted = b"".join(batch.data for batch in retained)
        if found != wanted:
            at = next((i for i, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted)))
            raise Broken(f"{type(self).__name__}: {len(found)} bytes instead of {len(wanted)}, different from {at} on")


class LogStartIsWhereItWasPut:
    """Deleted records that a checkpoint knows of do not come back; nothing else was deleted."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        start = log.log_start_offset
        if model.promised_end <= model.log_start and not model.kept_end:
            return  # nothing was promised, so the first segment may be lost and the second not
        require(
            model.promised_start <= start <= model.log_start,
            self,
            f"{start}: {model.promised_start}..{model.log_start}",
        )
        require(start <= log.high_watermark <= log.log_end_offset, self, f"the high watermark is {log.high_watermark}")


class IndexesAgreeWithTheLog:
    """Every row of every index is true of the batches, and look-ups find what a scan finds."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        for segment in log.segments:
            places: dict[int, int] = {}
            largest: dict[int, int] = {}
            so_far = -1
            for position, header in headers(segment):
                places[header.last_offset] = position
                so_far = max(so_far, header.max_timestamp)
                largest[header.last_offset] = so_far
            for offset, position in segment.offset_index.rows():
                require(places.get(offset) == position, self, f"{segment.path}: row {offset} -> {position}")
            for timestamp, offset in segment.time_index.rows():
                require(largest.get(offset) == timestamp, self, f"{segment.path}: row {timestamp} -> {offset}")
        if log.log_end_offset > log.log_start_offset:
            for _ in range(4):
                offset = rng.randrange(log.log_start_offset, log.log_end_offset)
                batch = next(b for b in model.batches if b.last_offset >= offset)
                found = log.read(offset, 1, log.log_end_offset)
                require(bytes(found.regions[0]) == batch.data, self, f"a read at {offset} gives another batch")


class TimestampsAreFound:
    """A look-up by time answers the first record that is not older."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        known = [timestamp for batch in model.batches for timestamp in batch.timestamps] or [0]
        for timestamp in (rng.choice(known), rng.choice(known) + 1, 0):
            expected = model.first_at_or_after(timestamp)
            found = log.offset_for_timestamp(timestamp)
            seen = (found.timestamp, found.offset) if found else None
            require(seen == expected, self, f"{timestamp} gives {seen}, a scan {expected}")


class ProducersAreRemembered:
    """Epochs, sequences and open transactions are those of the log, and a repeated batch is known for one."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        entries = log.producers.entries
        for producer_id, wanted in model.producers().items():
            entry = entries.get(producer_id)
            require(entry is not None, self, f"producer {producer_id} is forgotten")
            assert entry is not None
            require(
                entry.epoch == wanted.epoch, self, f"producer {producer_id} is at {entry.epoch}, not {wanted.epoch}"
            )
            opened = entry.transaction_first_offset
            known_from = max(log.log_start_offset, model.forgotten_below)
            same = opened == wanted.transaction_first_offset or -1 < opened < known_from
            require(
                same,
                self,
                f"the transaction of {producer_id} begins at {opened}, not {wanted.transaction_first_offset}",
            )
            if wanted.last is not None:
                self._check_repeat(log, wanted.last, opened)

    def _check_repeat(self, log: PartitionLog, batch: AppendedBatch, opened: int) -> None:
        """That of an ended transaction, before the open one or without one, is refused."""
        before = log.log_end_offset
        is_of_ended = read_header(batch.sent).is_transactional and not 0 <= opened <= batch.base_offset
        try:
            info = log.append_as_leader(memoryview(bytearray(batch.sent)), batch.leader_epoch, 0)
        except KafkaError as error:
            if is_of_ended and error.code is ErrorCode.INVALID_TXN_STATE:
                return
            raise Broken(
                f"{type(self).__name__}: a repeated batch of offset {batch.base_offset} gets {error}"
            ) from error
        repeated = info.duplicate and info.first_offset == batch.base_offset and log.log_end_offset == before
        repeated = repeated and not is_of_ended
        require(repeated, self, f"a repeated batch of offset {batch.base_offset} gets {info}")


class TransactionsAreKnown:
    """The stable offset is the first open transaction; the aborted ones are listed, and no others."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        first = log.segments.first.base_offset
        wanted = {row for row in model.aborted() if row[2] >= first}
        found = {row[:3] for row in log.aborted_transactions(first, log.log_end_offset)}
        # Where a transaction began is only known from the log start on, if it began before.
        known_from = max(log.log_start_offset, model.forgotten_below)
        cut = {(row[0], row[2]) for row in found | wanted if row[1] < known_from}
        differ = {row for row in found ^ wanted if (row[0], row[2]) not in cut}
        require(not differ, self, f"aborted {sorted(found)} instead of {sorted(wanted)}")
        opened = [p.transaction_first_offset for p in model.producers().values() if p.transaction_first_offset >= 0]
        if opened and min(opened) >= log.log_start_offset:
            stable = log.last_stable_offset
            require(stable <= min(opened), self, f"the stable offset is {stable}, {min(opened)} is undecided")


class LeaderEpochsAgree:
    """Every retained record's epoch is known, and no epoch is known that has none."""

    def check(self, log: PartitionLog, model: LogModel, rng: Random) -> None:
        real = {(b.leader_epoch, max(b.base_offset, log.log_start_offset)) for b in model.batches}
        for entry in log.leader_epochs:
            require(
                entry in real or entry[1] >= log.log_end_offset, self, f"epoch {entry[0]} never began at {entry[1]}"
            )
        for batch in model.batches:
            if batch.last_offset >= log.log_start_offset:
                offset = max(batch.base_offset, log.log_start_offset)
                epoch = log.leader_epochs.epoch_for_offset(offset)
                require(
                    epoch == batch.leader_epoch, self, f"offset {offset} is of epoch {batch.leader_epoch}, not {epoch}"
                )


INVARIANTS: Sequence[Invariant] = (
    LogStartIsWhereItWasPut(),
    AcknowledgedRecordsArePresent(),
    LogIsAPrefixOfWhatWasAppended(),
    IndexesAgreeWithTheLog(),
    TimestampsAreFound(),
    LeaderEpochsAgree(),
    TransactionsAreKnown(),
    ProducersAreRemembered(),
)
