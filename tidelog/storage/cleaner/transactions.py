"""Tracks transactions while the cleaner reads a log: which batches are aborted, and which markers are still needed.

Pure. The rules are those of Kafka's CleanedTransactionMetadata: a batch of an aborted transaction may be removed with
any keys; a marker may be removed if no batch of its transaction is left. Invariant: the caller passes the batches in
the order of the log, from the first one on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.protocol.batches.control_batches import ControlRecordType
from tidelog.protocol.batches.record_batch import BatchHeader

if TYPE_CHECKING:
    from tidelog.storage.segments.transaction_index import AbortedTransaction


class CleanedTransactions:
    """`aborted`: every aborted transaction with records in the cleaned range."""

    __slots__ = ("_aborted", "_committing", "_waiting")

    def __init__(self, aborted: Iterable[AbortedTransaction]) -> None:
        self._waiting = sorted(aborted, key=lambda row: row.first_offset, reverse=True)
        # Producer id -> its transaction that will be aborted, and whether the cleaner has read a batch of it.
        self._aborted: dict[int, tuple[AbortedTransaction, bool]] = {}
        self._committing: set[int] = set()

    def on_data(self, header: BatchHeader) -> bool:
        """Whether the batch belongs to an aborted transaction."""
        self._begin_until(header.last_offset)
        if not header.is_transactional:
            return False
        aborted = self._aborted.get(header.producer_id)
        if aborted is None:
            self._committing.add(header.producer_id)
            return False
        self._aborted[header.producer_id] = (aborted[0], True)
        return True

    def on_control(self, header: BatchHeader, kind: ControlRecordType | None) -> tuple[bool, AbortedTransaction | None]:
        """(whether the marker may be removed, the aborted transaction for the cleaned segment's index).

        `kind` None: the batch has no record, because it was cleaned before.
        """
        self._begin_until(header.last_offset)
        if kind is None:
            return True, None
        if kind is ControlRecordType.ABORT:
            aborted = self._aborted.pop(header.producer_id, None)
            if aborted is not None and aborted[1]:
                return False, aborted[0]
            return True, None
        if kind is ControlRecordType.COMMIT:
            if header.producer_id in self._committing:
                self._committing.discard(header.producer_id)
                return False, None
            return True, None
        return False, None

    def _begin_until(self, offset: int) -> None:
        waiting = self._waiting
        while waiting and waiting[-1].first_offset <= offset:
            row = waiting.pop()
            self._aborted.setdefault(row.producer_id, (row, False))
