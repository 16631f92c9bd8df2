"""The state of each producer of a partition: sequences, duplicates, open transactions, the last stable offset.

Pure: `check` decides whether a batch may be appended, `accept` records an append. The rules are those of Kafka's
ProducerStateManager and ProducerAppendInfo (KIP-98, KIP-890). Invariant: the state is a function of the log up to
`end_offset` (and of the snapshots taken of it), so replaying the log rebuilds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from tidelog.protocol.batches.record_batch import (
    CONTROL_FLAG,
    NO_SEQUENCE,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    increment_sequence,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.producers.refused_batches import RefusedOfPartition
from tidelog.storage.producers.transitions import Transitions
from tidelog.storage.producers.verification import Verification, Verifications

BATCHES_RETAINED: Final = 5  # as many as an idempotent producer may have in flight
PRODUCERS_MAX: Final = 50_000
"""Producers of one partition, 430 B each. Beyond it those are forgotten that have not written for the longest: any
client can write with ids of its own making, and their usual end comes after `producer.id.expiration.ms`."""
NO_OFFSET: Final = -1
_NOT_SEEN: Final = -2
NO_EPOCH: Final = -1
STRICT_MARKERS_FROM: Final = 2
"""From this transaction version on, each transaction of a producer has an epoch of its own."""
_MAX_SEQUENCE: Final = 2**31 - 1
_MAX_EPOCH: Final = 2**15 - 1

SentBatch = tuple[int, int, int, int, int]
"""A batch that was appended: first sequence, last sequence, first offset, last offset, maximum timestamp.
A plain tuple, because one is made for every produce."""
FIRST_SEQUENCE, LAST_SEQUENCE, FIRST_OFFSET, LAST_OFFSET, MAX_TIMESTAMP = range(5)


class EndMarker(NamedTuple):
    """A transaction marker in the log."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    is_abort: bool
    offset: int
    timestamp: int


class CompletedTransaction(NamedTuple):
    """`last_offset` is the marker's. `last_stable_offset` is the LSO after the marker, for the .txnindex."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_abort: bool
    last_stable_offset: int


class ProducerEntry:
    """One producer: its epoch, its last five batches, and the first offset of its open transaction (-1: none).

    `last_timestamp` is the client's. By this node's clock it has not written since `idle_since_ms`, if `last_offset` is
    still `seen_offset`.
    """

    __slots__ = (
        "batches", "coordinator_epoch", "epoch", "idle_since_ms", "last_timestamp", "producer_id", "seen_offset",
        "transaction_first_offset",
    )  # fmt: skip

    def __init__(
        self,
        producer_id: int,
        epoch: int = NO_EPOCH,
        coordinator_epoch: int = -1,
        last_timestamp: int = -1,
        transaction_first_offset: int = NO_OFFSET,
        batches: Iterable[SentBatch] = (),
    ) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.coordinator_epoch = coordinator_epoch
        self.last_timestamp = last_timestamp
        self.transaction_first_offset = transaction_first_offset
        self.batches: list[SentBatch] = list(batches)
        self.seen_offset, self.idle_since_ms = _NOT_SEEN, -1

    @property
    def last_sequence(self) -> int:
        return self.batches[-1][LAST_SEQUENCE] if self.batches else -1

    @property
    def last_offset(self) -> int:
        return self.batches[-1][LAST_OFFSET] if self.batches else NO_OFFSET

    def note_idle(self, since_ms: int) -> None:
        self.seen_offset, self.idle_since_ms = self.last_offset, since_ms

    def copy(self) -> ProducerEntry:
        return ProducerEntry(
            self.producer_id,
            self.epoch,
            self.coordinator_epoch,
            self.last_timestamp,
            self.transaction_first_offset,
            self.batches,
        )

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"ProducerEntry({fields})"


class EarlierState(NamedTuple):
    """The state at an earlier end of the log: the entries that differ from the present ones, None for no entry."""

    end_offset: int
    entries: dict[int, ProducerEntry | None]


class ProducerState:
    """All producers of one partition, and its transactions that are open or not yet replicated."""

    __slots__ = (
        "_forget_above", "_transitions", "end_offset", "entries", "ongoing", "refused", "unreplicated",
        "verifications",
    )  # fmt: skip

    def __init__(self) -> None:
        self.refused: RefusedOfPartition | None = None
        """Refused batches that clients send again. The leading replica sets it; it is not part of the state."""
        self.verifications = Verifications()
        """Verifications of transactions that are about to begin here; not part of the state."""
        self.entries: dict[int, ProducerEntry] = {}
        self._forget_above = PRODUCERS_MAX
        self.ongoing: dict[int, int] = {}  # first offset -> producer id, in rising order of offset
        self.unreplicated: dict[int, int] = {}  # first offset -> offset of the marker that is above the high watermark
        self._transitions: Transitions[ProducerEntry] = Transitions()
        self.end_offset = 0

    def __len__(self) -> int:
        return len(self.entries)

    def clear(self, end_offset: int) -> None:
        self.entries.clear()
        self.ongoing.clear()
        self.unreplicated.clear()
        self._transitions.clear(end_offset)
        self.end_offset = end_offset

    def load(self, entries: Iterable[ProducerEntry], end_offset: int) -> None:
        """Start from the entries of a snapshot taken at `end_offset`."""
        self.clear(end_offset)
        for entry in entries:
            self.entries[entry.producer_id] = entry
        self._find_ongoing()

    def take_over(self, other: ProducerState) -> None:
        """Take on the state of `other`, which is not used any more."""
        self.entries, self.ongoing, self.unreplicated = other.entries, other.ongoing, other.unreplicated
        self._transitions, self._forget_above = other._transitions, other._forget_above
        self.end_offset = other.end_offset

    def _find_ongoing(self) -> None:
        opened = (e for e in self.entries.values() if e.transaction_first_offset >= 0)
        in_order = sorted(opened, key=lambda e: e.transaction_first_offset)
        self.ongoing = {entry.transaction_first_offset: entry.producer_id for entry in in_order}

    # Batches of data

    def check(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        record_delta: int,
        is_transactional: bool,
        from_client: bool,
        now_ms: int = 0,
    ) -> SentBatch | None:
        """Whether a batch of `record_delta` + 1 records may be appended: None, or the batch that it repeats.

        Raises OUT_OF_ORDER_SEQUENCE_NUMBER, INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, and after refused batches their
        error. A producer that is unknown here, for example after its expiration, may begin with any sequence.
        """
        entry = self.entries.get(producer_id)
        if entry is None:
            if epoch < NO_EPOCH and from_client:
                raise _older_epoch(producer_id, epoch, NO_EPOCH)
            if from_client and self.refused is not None:
                self.refused.check_gap(producer_id, epoch, first_sequence, None, now_ms)
            return None
        if epoch < entry.epoch:
            raise _older_epoch(producer_id, epoch, entry.epoch)
        if from_client:
            if epoch == entry.epoch:
                batches = entry.batches
                last = batches[-1][LAST_SEQUENCE] if batches else -1
                if first_sequence != last + 1 and not (first_sequence == 0 and last == _MAX_SEQUENCE):
                    repeated = self.find_repeated(producer_id, epoch, first_sequence, record_delta)
                    if repeated is not None:
                        return repeated
                    if self.refused is not None:
                        expected = 0 if last == _MAX_SEQUENCE else last + 1
                        self.refused.check_gap(producer_id, epoch, first_sequence, expected, now_ms)
                    raise KafkaError(
                        ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                        f"sequence {first_sequence} of producer {producer_id} does not follow {last}",
                    )
            elif first_sequence:
                if self.refused is not None:
                    self.refused.check_gap(producer_id, epoch, first_sequence, 0, now_ms)
                raise KafkaError(
                    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    f"producer {producer_id} begins epoch {epoch} at sequence {first_sequence}",
                )
        if entry.transaction_first_offset >= 0 and not is_transactional:
            raise KafkaError(ErrorCode.INVALID_TXN_STATE, f"producer {producer_id} has an open transaction")
        return None

    def begin_verification(
        self, producer_id: int, epoch: int, first_sequence: int, adds: bool, now_ms: int
    ) -> Verification | None:
        """The verification that a transactional batch needs; None if its transaction is open here.

        Raises INVALID_PRODUCER_EPOCH.
        """
        entry = self.entries.get(producer_id)
        if entry is not None:
            if epoch < entry.epoch:
                raise _older_epoch(producer_id, epoch, entry.epoch)
            if epoch == entry.epoch and entry.transaction_first_offset >= 0:
                return None
        return self.verifications.begin(producer_id, epoch, first_sequence, adds, now_ms)

    def check_transactional(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        record_delta: int,
        from_client: bool,
        now_ms: int,
        verification: Verification | None,
        needs_verification: bool,
    ) -> SentBatch | None:
        """`check` for a transactional batch. A batch that opens a transaction must have the present verification.

        Otherwise raises INVALID_TXN_STATE, but INVALID_PRODUCER_EPOCH first, because producers recover from it. Raises
        INVALID_TXN_STATE also for what repeats a batch of an ended transaction.
        """
        if from_client:
            repeated = self.find_repeated(producer_id, epoch, first_sequence, record_delta)
            if repeated is not None:
                if self.is_of_ended_transaction(producer_id, repeated):
                    raise KafkaError(
                        ErrorCode.INVALID_TXN_STATE,
                        f"sequence {first_sequence} of producer {producer_id} is that of a batch whose transaction has "
                        f"ended",
                    )
                return repeated
        entry = self.entries.get(producer_id)
        if entry is None or entry.transaction_first_offset < 0 or entry.epoch != epoch:
            if entry is not None and epoch < entry.epoch:
                raise _older_epoch(producer_id, epoch, entry.epoch)
            if needs_verification and not self.verifications.holds(producer_id, verification):
                raise KafkaError(
                    ErrorCode.INVALID_TXN_STATE, f"no transaction of producer {producer_id} is open in this partition"
                )
        if from_client:
            self._check_first_sequence(producer_id, epoch, first_sequence, entry, now_ms)
        return self.check(producer_id, epoch, first_sequence, record_delta, True, from_client, now_ms)

    def _check_first_sequence(
        self, producer_id: int, epoch: int, first_sequence: int, entry: ProducerEntry | None, now_ms: int
    ) -> None:
        """Refuse a batch that would overtake one that waits for the verification, or was refused after it."""
        under_way = self.verifications.get(producer_id)
        if under_way is None:
            return
        is_unknown = under_way.adds and (entry is None or not entry.batches)
        lowest_sequence = 0 if is_unknown else under_way.lowest_sequence
        if first_sequence > lowest_sequence:
            if self.refused is not None:
                expected = self.expected_sequence(producer_id, epoch)
                self.refused.check_gap(producer_id, epoch, first_sequence, expected, now_ms)
            raise KafkaError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"sequence {first_sequence} of producer {producer_id} is not the first of its transaction, "
                f"{lowest_sequence}",
            )

    def find_repeated(self, producer_id: int, epoch: int, first_sequence: int, record_delta: int) -> SentBatch | None:
        """The batch in the log that this one repeats, if it is among the last five of its producer."""
        entry = self.entries.get(producer_id)
        if entry is None or entry.epoch != epoch:
            return None
        last_sequence = increment_sequence(first_sequence, record_delta)
        for batch in entry.batches:
            if batch[FIRST_SEQUENCE] == first_sequence and batch[LAST_SEQUENCE] == last_sequence:
                return batch
        return None

    def is_of_ended_transaction(self, producer_id: int, batch: SentBatch) -> bool:
        """Whether a retained batch of the producer lies before its open transaction, or none is open.

        A client has all answers, or gives the batch up, before it ends a transaction. So what repeats such a batch in
        the next transaction of the same epoch (version 1) holds other records: librdkafka gives the sequence of a
        batch that it gave up to the next one. Deviation: Kafka answers as for the batch in the log, and the client
        takes records for committed that are nowhere.
        """
        first_offset = self.entries[producer_id].transaction_first_offset
        return first_offset < 0 or batch[FIRST_OFFSET] < first_offset

    def expected_sequence(self, producer_id: int, epoch: int) -> int | None:
        """The next sequence; None for an unknown producer or an old epoch."""
        entry = self.entries.get(producer_id)
        if entry is None or epoch < entry.epoch:
            return None
        last = entry.last_sequence if epoch == entry.epoch else -1
        return 0 if last == _MAX_SEQUENCE else last + 1

    def accept(
        self,
        producer_id: int,
        epoch: int,
        first_sequence: int,
        first_offset: int,
        last_offset: int,
        timestamp: int,
        is_transactional: bool,
    ) -> None:
        """Record a batch that was appended to the log."""
        entry = self.entries.get(producer_id)
        if entry is None:
            self._transitions.add(first_offset, producer_id, None)
            entry = self._add_entry(producer_id, epoch)
        elif entry.epoch != epoch or (is_transactional and entry.transaction_first_offset < 0):
            self._transitions.add(first_offset, producer_id, entry.copy())
        batches = entry.batches
        if entry.epoch != epoch:
            entry.epoch = epoch
            batches.clear()
        last_sequence = first_sequence + last_offset - first_offset
        if last_sequence > _MAX_SEQUENCE:
            last_sequence = increment_sequence(first_sequence, last_offset - first_offset)
        batches.append((first_sequence, last_sequence, first_offset, last_offset, timestamp))
        if len(batches) > BATCHES_RETAINED:
            del batches[0]
        entry.last_timestamp = timestamp
        if is_transactional and entry.transaction_first_offset < 0:
            entry.transaction_first_offset = first_offset
            self.ongoing[first_offset] = producer_id
        if is_transactional:
            if first_sequence < 0:  # coordinators write without sequences
                batches[-1] = (NO_SEQUENCE, NO_SEQUENCE, first_offset, last_offset, timestamp)
            if self.verifications:
                self.verifications.end(producer_id)

    # Transaction markers

    def check_marker(self, marker: EndMarker, transaction_version: int = 0) -> None:
        """Raises INVALID_PRODUCER_EPOCH, TRANSACTION_COORDINATOR_FENCED.

        With transaction version 2 the coordinator raises the epoch for the marker, so a marker of the present epoch is
        late. It is accepted without an open transaction, because the coordinator then repeats an unanswered marker, and
        at the maximum epoch, which cannot be raised.
        """
        entry = self.entries.get(marker.producer_id)
        if entry is None:
            entry = ProducerEntry(marker.producer_id, marker.producer_epoch)  # no marker was seen: coordinator epoch -1
        epoch = marker.producer_epoch
        is_late = epoch < entry.epoch
        if epoch == entry.epoch and transaction_version >= STRICT_MARKERS_FROM:
            is_late = entry.transaction_first_offset >= 0 and epoch != _MAX_EPOCH
        if is_late:
            raise KafkaError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"a marker of epoch {epoch} and transaction version {transaction_version}, the producer is at "
                f"{entry.epoch}",
            )
        if marker.coordinator_epoch < entry.coordinator_epoch:
            raise KafkaError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"a marker of coordinator epoch {marker.coordinator_epoch}, {entry.coordinator_epoch} was seen",
            )

    def accept_marker(self, marker: EndMarker) -> CompletedTransaction | None:
        """Record a marker that was appended to the log. The transaction that it completed, if one was open."""
        if self.verifications:
            self.verifications.end_by_marker(marker.producer_id, marker.producer_epoch)
        entry = self.entries.get(marker.producer_id)
        self._transitions.add(marker.offset, marker.producer_id, None if entry is None else entry.copy())
        if entry is None:
            entry = self._add_entry(marker.producer_id, marker.producer_epoch)
        if entry.epoch != marker.producer_epoch:
            entry.epoch = marker.producer_epoch
            entry.batches.clear()
        first_offset = entry.transaction_first_offset
        entry.coordinator_epoch = marker.coordinator_epoch
        entry.last_timestamp = marker.timestamp
        entry.transaction_first_offset = NO_OFFSET
        if first_offset < 0:
            return None
        del self.ongoing[first_offset]
        self.unreplicated[first_offset] = marker.offset
        stable = next(iter(self.ongoing), marker.offset + 1)
        return CompletedTransaction(marker.producer_id, first_offset, marker.offset, marker.is_abort, stable)

    def replay(self, header: BatchHeader, marker: EndMarker | None) -> CompletedTransaction | None:
        """Record a batch from the log without checks. `marker`: that of a control batch of a producer."""
        completed = None
        if header.producer_id >= 0:
            if marker is not None:
                completed = self.accept_marker(marker)
            elif not header.attributes & CONTROL_FLAG:
                self.accept(
                    header.producer_id,
                    header.producer_epoch,
                    header.base_sequence,
                    header.base_offset,
                    header.last_offset,
                    header.max_timestamp,
                    bool(header.attributes & TRANSACTIONAL_FLAG),
                )
        self.end_offset = header.next_offset
        return completed

    # Truncation

    def earlier(self, end_offset: int) -> EarlierState | None:
        """The state at `end_offset`. Changes nothing.

        None where only the log has it: for changes that are forgotten, for a producer of which no batch before
        `end_offset` is left here, and for one that wrote outside transactions after a transaction. A producer keeps
        those of its last five batches that stay. Its client has had the answers of earlier ones, and does not send them
        again.
        """
        if end_offset < self._transitions.complete_from:
            return None
        earlier = self._transitions.before(end_offset)
        for producer_id, entry in (self.entries | earlier).items():
            if entry is None or not entry.batches or entry.batches[-1][LAST_OFFSET] < end_offset:
                continue
            if entry.transaction_first_offset < 0 <= entry.coordinator_epoch:
                return None
            batches = [batch for batch in entry.batches if batch[LAST_OFFSET] < end_offset]
            if not batches:
                return None
            earlier[producer_id] = entry = entry.copy()
            entry.batches = batches
            entry.last_timestamp = batches[-1][MAX_TIMESTAMP]
        return EarlierState(end_offset, earlier)

    def return_to(self, earlier: EarlierState) -> None:
        """Take an earlier state on, after the log was truncated to its end."""
        for producer_id, entry in earlier.entries.items():
            if entry is None:
                self.entries.pop(producer_id, None)
            else:
                self.entries[producer_id] = entry
        self._find_ongoing()
        end_offset = earlier.end_offset
        self.unreplicated = {first: last for first, last in self.unreplicated.items() if last < end_offset}
        self._transitions.forget_from(end_offset)
        self.end_offset = end_offset

    # Offsets that depend on transactions

    @property
    def first_unstable_offset(self) -> int:
        """The first offset of a transaction that is open, or whose marker is not replicated; -1 without one."""
        ongoing = self.first_open_offset
        if not self.unreplicated:
            return ongoing
        unreplicated = min(self.unreplicated)
        return unreplicated if ongoing < 0 else min(ongoing, unreplicated)

    @property
    def first_open_offset(self) -> int:
        """The first offset of the oldest open transaction, -1 without one."""
        return next(iter(self.ongoing), NO_OFFSET)

    @property
    def open_transaction_count(self) -> int:
        return len(self.ongoing)

    @property
    def has_transactions(self) -> bool:
        return bool(self.ongoing) or bool(self.unreplicated)

    @property
    def oldest_transaction_timestamp(self) -> int:
        """The last timestamp of the producer of the oldest open transaction, -1 without one."""
        for producer_id in self.ongoing.values():
            return self.entries[producer_id].last_timestamp
        return -1

    def on_high_watermark(self, high_watermark: int) -> None:
        """Forget completed transactions whose markers are below the high watermark, and so replicated."""
        if self.unreplicated:
            done = [first for first, last in self.unreplicated.items() if last < high_watermark]
            for first_offset in done:
                del self.unreplicated[first_offset]
        self._transitions.forget_below(high_watermark)

    def remove_expired(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers without a write for `expiration_ms` and without an open transaction. Their number.

        Clients choose the times of their records, and those of one that writes now may be old. So a producer is idle
        from the first call on that meets it after its last write, or by `expiration.py` from a start on.
        """
        expired = []
        for producer_id, entry in self.entries.items():
            if entry.last_offset != entry.seen_offset:
                entry.note_idle(now_ms)
            written_ms = max(entry.last_timestamp, entry.idle_since_ms)
            if entry.transaction_first_offset < 0 and now_ms - written_ms >= expiration_ms:
                expired.append(producer_id)
        for producer_id in expired:
            del self.entries[producer_id]
        if self.verifications:
            self.verifications.remove_expired(now_ms, expiration_ms)
        return len(expired)

    def _add_entry(self, producer_id: int, epoch: int) -> ProducerEntry:
        if len(self.entries) >= self._forget_above:
            self._forget_idlest()
        entry = self.entries[producer_id] = ProducerEntry(producer_id, epoch)
        return entry

    def _forget_idlest(self) -> None:
        """Make room: forget those without an open transaction whose last batch lies farthest back in the log.

        Their offsets decide, because clients choose the timestamps. An eighth at once, because it looks at all.
        """
        idle = {
            producer_id: entry.last_offset
            for producer_id, entry in self.entries.items()
            if entry.transaction_first_offset < 0
        }
        room = PRODUCERS_MAX // 8
        farthest = sorted(idle.values())[: len(self.entries) - PRODUCERS_MAX + room]
        for producer_id, offset in idle.items():
            if farthest and offset <= farthest[-1]:
                del self.entries[producer_id]
        self._forget_above = max(PRODUCERS_MAX, len(self.entries) + room)


def _older_epoch(producer_id: int, epoch: int, known: int) -> KafkaError:
    return KafkaError(
        ErrorCode.INVALID_PRODUCER_EPOCH, f"epoch {epoch} of producer {producer_id} is older than {known}"
    )
