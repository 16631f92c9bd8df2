"""Batches of idempotent producers that this node has refused with a retriable error.

A producer has several batches of a partition in flight. If the first is refused because the ISR is too small, and the
ISR grows before the second is checked, the second has a gap in the sequence. OUT_OF_ORDER_SEQUENCE_NUMBER would be
formally right, but librdkafka then raises its epoch and writes its unanswered batches to other leaders a second time.
If the log does not know the producer, the second batch would even be accepted, because such a producer may begin with
any sequence; librdkafka then assumes that the first is in the log too. So a batch after a gap of only refused batches
is refused with the same error, until the first of them is sent again.

A new leader does not know what the leader before it has refused, or has not answered. So a gap that it meets after an
election is refused as retriable for a short time, also behind a batch of the present leader epoch: the client may have
sent that one again before it had the answer to the next. The time counts from the first batch behind the gap, because
the client may come late: librdkafka first waits until the old leader, which may hang, has answered or its request has
timed out. It then counts that request as done before its batch is back in the queue, and may send the next one first.

Pure. Invariant: all entries are bounded, in number and in time; Kafka's rules apply to forgotten ones.
"""

from __future__ import annotations

from struct import error as StructError
from typing import TYPE_CHECKING, Final

from tidelog.protocol.batches.record_batch import CONTROL_FLAG, HEADER_SIZE, MAGIC, BatchHeader, read_header
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Buffer

# Refusals after which every client sends the same batch again. The batch is not in the log.
RETRIED: Final = frozenset(
    (
        ErrorCode.NOT_ENOUGH_REPLICAS,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
    )
)
# The wait for the first batch ends after this time, or after this many other batches: its producer has given it up. By
# default no client keeps a batch longer, or has more than five in flight.
AWAITED_MS_MAX: Final = 300_000
GAPS_REFUSED_MAX: Final = 100
# The same for a producer that the partition does not know, since the first batch was last refused. It may be in the log
# by another leader, and its producer expired since. Clients send it again within a second or so.
UNKNOWN_AWAITED_MS_MAX: Final = 10_000
# Bound for all partitions of a node. Known producers are kept apart, so that invented ids do not displace them.
PRODUCERS_MAX: Final = 10_000
# A client sends a refused batch again after its backoff, at most 1 s by default. librdkafka was seen to send the batch
# behind it to the new leader 84 ms earlier.
GAPS_AFTER_ELECTION_REFUSED_MS: Final = 2_000
"""From the election and from the first batch behind a gap; for a producer unknown to the log, from the election."""
_SEQUENCES: Final = 2**31

Place = tuple[str | bytes, int]
"""A partition: topic id or name, and index."""


class _Run:
    """Contiguous refused batches of one producer, from `first_sequence` to before `next_sequence`."""

    __slots__ = ("code", "first_sequence", "gaps_refused", "next_sequence", "producer_epoch", "since_ms")

    def __init__(self, header: BatchHeader, code: ErrorCode, now_ms: int) -> None:
        self.producer_epoch = header.producer_epoch
        self.first_sequence = header.base_sequence
        self.next_sequence = _after(header.last_sequence)
        self.code = code
        self.since_ms = now_ms
        self.gaps_refused = 0

    def continues_at(self, sequence: int) -> bool:
        """Whether a batch with this first sequence has only refused batches between it and the first one."""
        distance = (sequence - self.first_sequence) % _SEQUENCES
        return 0 < distance <= (self.next_sequence - self.first_sequence) % _SEQUENCES

    def extend(self, last_sequence: int) -> None:
        length = (self.next_sequence - self.first_sequence) % _SEQUENCES
        if (last_sequence + 1 - self.first_sequence) % _SEQUENCES > length:
            self.next_sequence = _after(last_sequence)

    def is_awaited(self, now_ms: int) -> bool:
        # The clock may have been set back.
        return abs(now_ms - self.since_ms) <= AWAITED_MS_MAX and self.gaps_refused < GAPS_REFUSED_MAX


class RefusedBatches:
    """The refused batches of one node: one run for each producer and partition."""

    __slots__ = ("_gaps", "_known", "_unknown", "producers_max")

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        self.producers_max = producers_max
        self._known: dict[tuple[Place, int], _Run] = {}
        self._unknown: dict[tuple[Place, int], _Run] = {}
        self._gaps: dict[tuple[Place, int], tuple[int, int, int]] = {}
        """Of a producer after an election: its epoch, the sequence that the log expects, when a gap was first met."""

    def __len__(self) -> int:
        return len(self._known) + len(self._unknown)

    def of(self, *places: Place) -> RefusedOfPartition:
        """The refused batches of one partition, under all its names."""
        return RefusedOfPartition(self, places)

    def note(
        self, places: tuple[Place, ...], header: BatchHeader, code: ErrorCode, expected: int | None, now_ms: int
    ) -> None:
        """A client's batch was refused with `code`. `expected`: as in `find_cause`."""
        producer_id, first_sequence = header.producer_id, header.base_sequence
        run = None
        for place in places:
            for runs in (self._known, self._unknown):
                run = runs.pop((place, producer_id), None) or run
        if run is not None and (run.producer_epoch != header.producer_epoch or not run.is_awaited(now_ms)):
            run = None
        if run is not None and expected is not None and run.continues_at(expected):
            run.first_sequence = expected  # the batches before it were sent again and are in the log
        if run is not None and run.continues_at(first_sequence):
            run.extend(header.last_sequence)
        elif code in RETRIED:
            behind, run = run, _Run(header, code, now_ms)
            if behind is not None and run.continues_at(behind.first_sequence):
                # This batch was appended and then truncated. The batches behind it were refused before that.
                run.extend((behind.next_sequence - 1) % _SEQUENCES)
        elif run is None or run.first_sequence == first_sequence:
            # The first batch is refused with a final error. The gap that it leaves is not from the leader before: it
            # counts as met so long ago that it is not retriable.
            if expected == first_sequence:
                met_ms = now_ms - GAPS_AFTER_ELECTION_REFUSED_MS - 1
                self.gap_since(places[0], producer_id, header.producer_epoch, expected, met_ms)
            return
        runs = self._unknown if expected is None else self._known
        runs[places[0], producer_id] = run
        if len(runs) > self.producers_max:
            del runs[next(iter(runs))]

    def find_cause(
        self,
        places: tuple[Place, ...],
        producer_id: int,
        epoch: int,
        first_sequence: int,
        expected: int | None,
        now_ms: int,
    ) -> ErrorCode | None:
        """The error of the refused batches before this one, if the gap in the log consists only of such batches.

        `expected`: the sequence that the log expects next; None when it does not know the producer.
        """
        for place in places:
            key = (place, producer_id)
            run = self._known.get(key) or self._unknown.get(key)
            if run is None or run.producer_epoch != epoch or not run.is_awaited(now_ms):
                continue
            if expected is None and abs(now_ms - run.since_ms) > UNKNOWN_AWAITED_MS_MAX:
                continue
            if expected in (None, run.first_sequence) and run.continues_at(first_sequence):
                run.gaps_refused += 1
                return run.code
        return None

    def gap_since(self, place: Place, producer_id: int, epoch: int, expected: int, now_ms: int) -> int:
        """When this gap of the producer was first met here, in ms, perhaps before the present election."""
        key, gaps = (place, producer_id), self._gaps
        gap = gaps.get(key)
        if gap is None or gap[:2] != (epoch, expected):
            gaps.pop(key, None)
            gap = gaps[key] = epoch, expected, now_ms
            if len(gaps) > self.producers_max:
                del gaps[next(iter(gaps))]
        return gap[2]


class RefusedOfPartition:
    """The refused batches of one partition. `places`: its key in `RefusedBatches`, then its other names."""

    __slots__ = ("_elected_ms", "_places", "_refused")

    def __init__(self, refused: RefusedBatches, places: tuple[Place, ...]) -> None:
        self._refused = refused
        self._places = places
        self._elected_ms: int | None = None

    def on_election(self, now_ms: int) -> None:
        """This replica takes over from another leader or process, which may have refused batches a moment ago."""
        self._elected_ms = now_ms

    def note(self, header: BatchHeader, code: ErrorCode, expected: int | None, now_ms: int) -> None:
        self._refused.note(self._places, header, code, expected, now_ms)

    def check_gap(self, producer_id: int, epoch: int, first_sequence: int, expected: int | None, now_ms: int) -> None:
        """Raises a retriable error if the batches before this one were refused, here or, perhaps, by the leader before.

        `expected`: as in `RefusedBatches.find_cause`.
        """
        code = self._refused.find_cause(self._places, producer_id, epoch, first_sequence, expected, now_ms)
        if code is not None:
            raise KafkaError(
                code, f"the batches of producer {producer_id} before sequence {first_sequence} were refused"
            )
        if self._elected_ms is None or not 0 < (first_sequence - (expected or 0)) % _SEQUENCES < _SEQUENCES // 2:
            return
        since_ms = abs(now_ms - self._elected_ms)
        if expected is None:
            is_retriable = since_ms <= GAPS_AFTER_ELECTION_REFUSED_MS
        elif since_ms > AWAITED_MS_MAX:
            # The leader before was given the missing batch, and no client keeps a batch for longer.
            is_retriable = False
        else:
            met_ms = self._refused.gap_since(self._places[0], producer_id, epoch, expected, now_ms)
            is_retriable = min(since_ms, abs(now_ms - met_ms)) <= GAPS_AFTER_ELECTION_REFUSED_MS
        if is_retriable:
            raise KafkaError(
                ErrorCode.NOT_LEADER_OR_FOLLOWER,
                f"the leader before may have refused the batches of producer {producer_id} before sequence "
                f"{first_sequence}",
            )


def _after(sequence: int) -> int:
    return (sequence + 1) % _SEQUENCES


def sequenced_header(batches: Buffer | None) -> BatchHeader | None:
    """The header of a client's batch if it has a sequence. The CRC is not checked."""
    if batches is None or len(batches) < HEADER_SIZE:
        return None
    try:
        header = read_header(batches)
    except (KafkaError, StructError):
        return None
    is_data = header.magic == MAGIC and not header.attributes & CONTROL_FLAG and header.last_offset_delta >= 0
    return header if is_data and header.producer_id >= 0 and header.base_sequence >= 0 else None
