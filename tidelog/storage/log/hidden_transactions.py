"""Transactions of which damage hides the beginning or the end, until it is repaired.

While a log is scanned, `ScannedTransactions` chooses the rows of the indexes of aborted transactions: from the batches,
or from the index files where damage hides batches. `stable_bound` keeps readers of committed records from records of
which nothing here says whether they were committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from tidelog.storage.segments.damage import DamagedRange, DamagedRecords
from tidelog.storage.segments.log_config import INT64_MAX
from tidelog.storage.segments.transaction_index import AbortedTransaction, TransactionIndex

if TYPE_CHECKING:
    from tidelog.storage.producers.producer_state import CompletedTransaction, ProducerState
    from tidelog.storage.segments.segment import Segment


class HidingLog(Protocol):
    """The part of `partition_log.PartitionLog` that is used here."""

    hidden_ends: tuple[tuple[int, int], ...]
    accepted_losses: frozenset[int]
    lacks_producers: bool
    log_start_offset: int
    passes_damage: bool
    repairs_to_reveal: tuple[DamagedRange | None, ...]

    @property
    def last_stable_offset(self) -> int: ...
    def damaged_ranges(self) -> list[tuple[Segment, DamagedRange]]: ...


class ScannedTransactions:
    """`hidden_ends`: [first offset, end) of records of transactions that are open where damage begins.

    The damage may hide how they end. Then a later end of their producer's would be taken for theirs.
    """

    def __init__(self) -> None:
        self.hidden_ends: list[tuple[int, int]] = []
        self._filed: dict[int, AbortedTransaction] = {}
        self._has_damage = False

    def begin_segment(self, filed_rows: Iterable[AbortedTransaction], *, is_behind_damage: bool) -> None:
        """`filed_rows`: the aborted transactions of the next segment as files have them."""
        self._has_damage = is_behind_damage
        self._filed = {row.last_offset: row for row in filed_rows}

    def note_damage(self, damage: DamagedRange, producers: ProducerState, index: TransactionIndex) -> None:
        """The scan has come to the damage. The file's rows of markers in it go to the index."""
        self._has_damage = True
        if producers.first_open_offset >= 0:
            self.hidden_ends.append((producers.first_open_offset, damage.first_offset))
        for last_offset in sorted(self._filed):
            if damage.holds(last_offset):
                index.append(self._filed[last_offset])

    def note(self, completed: CompletedTransaction, index: TransactionIndex) -> None:
        """The scan has come to the marker of an aborted transaction."""
        filed = self._filed.get(completed.last_offset) if self._has_damage else None
        is_same = filed is not None and filed.producer_id == completed.producer_id
        index.append(filed if filed is not None and is_same else aborted(completed))


def aborted(completed: CompletedTransaction) -> AbortedTransaction:
    return AbortedTransaction(
        completed.producer_id, completed.first_offset, completed.last_offset, completed.last_stable_offset
    )


def note_end(completed: CompletedTransaction | None, index: TransactionIndex, *, may_be_wrong: bool) -> None:
    """A marker was appended. `completed`: the transaction that it ends, None if none is known.

    `may_be_wrong`: damage may hide where the transaction began, or all its records; the repair tells.
    """
    if completed is not None and completed.is_abort:
        index.append(aborted(completed))
    index.lacks_rows = index.lacks_rows or may_be_wrong


def damage_to_repair(log: HidingLog) -> list[tuple[Segment, DamagedRange]]:
    """The damaged ranges, without those of which no replica has a copy."""
    return [each for each in log.damaged_ranges() if each[1].first_offset not in log.accepted_losses]


def distrust_behind_losses(log: HidingLog, repaired: DamagedRange | None, left: Sequence[DamagedRange]) -> None:
    """End the acceptance of losses that are repaired now. What the log knows of producers is without their batches.

    `repaired`: None where the log was replaced. `left`: the damage that is left.
    """
    gone = log.accepted_losses.difference(each.first_offset for each in left)
    log.accepted_losses -= gone
    if any(each >= log.log_start_offset or (repaired and each == repaired.first_offset) for each in gone):
        log.lacks_producers = log.passes_damage


@contextmanager
def revealing(log: HidingLog) -> Iterator[DamagedRange | None]:
    """What the repair of the first of `repairs_to_reveal` reveals is read in the body.

    If a shortage interrupts that, the range stays, and readers of committed records wait before it: transactions that
    begin in it are not known.
    """
    repaired, log.repairs_to_reveal = log.repairs_to_reveal[0], log.repairs_to_reveal[1:]
    try:
        yield repaired
    except OSError:
        log.repairs_to_reveal = (repaired, *log.repairs_to_reveal)
        log.hidden_ends += ((log.log_start_offset if repaired is None else repaired.first_offset, INT64_MAX),)
        raise
    if not log.repairs_to_reveal:
        log.hidden_ends = tuple(each for each in log.hidden_ends if each[1] < INT64_MAX)


def stable_bound(log: HidingLog, offset: int) -> int:
    """The bound for a read of committed records from `offset` on: the last stable offset, or the first record of a
    transaction of which damage may hide the end, or where a shortage hides it after the repair.

    Raises DamagedRecords for such a record, until the repair.
    """
    bound = log.last_stable_offset
    to_repair = damage_to_repair(log)
    if not to_repair and not log.repairs_to_reveal:
        log.hidden_ends = ()
    for first_offset, end_offset in log.hidden_ends:
        if first_offset <= offset < min(end_offset, bound):
            if not to_repair:
                return offset
            segment, damage = next((each for each in to_repair if each[1].end_offset > first_offset), to_repair[0])
            raise DamagedRecords(segment.path, damage)
        if offset < first_offset:
            bound = min(bound, first_offset)
    return bound
