"""The classic mistakes of transactions, each planted with one stroke: what histories of transactions must catch.

Each takes pytest's monkeypatch, or anything with its `setattr`, and leaves the code otherwise as it is.
"""

from __future__ import annotations

from typing import Any

from tidelog.broker.coordinators.marker_writer import Marker, MarkerWriter
from tidelog.broker.coordinators.outcome import Now, Outcome
from tidelog.broker.coordinators.transaction import transitions
from tidelog.broker.coordinators.transaction.coordinator import TransactionCoordinator
from tidelog.broker.coordinators.transaction_verifier import CoordinatorVerifier
from tidelog.protocol.errors import ErrorCode
from tidelog.storage.log.partition_log import PartitionLog

ONE = ("t", 1)


def leave_out_one_marker(patch: Any) -> None:
    """A partition says that it has written a marker, and has not."""
    append = MarkerWriter._append

    def careless(writer: MarkerWriter, marker: Marker, partition: Any, on_written: Any) -> None:
        if partition == ONE:
            on_written(partition, ErrorCode.NONE)
        else:
            append(writer, marker, partition, on_written)

    patch.setattr(MarkerWriter, "_append", careless)


def abort_in_one_partition(patch: Any) -> None:
    """The marker of one partition says abort, whatever was decided."""
    append = MarkerWriter._append

    def torn(writer: MarkerWriter, marker: Marker, partition: Any, on_written: Any) -> None:
        is_commit = marker.is_commit and partition != ONE
        append(writer, marker._replace(is_commit=is_commit), partition, on_written)

    patch.setattr(MarkerWriter, "_append", torn)


def commit_offsets_of_aborted_transactions(patch: Any) -> None:
    """The group's coordinator takes every marker for one of a commit."""
    end = MarkerWriter._end_offsets

    def credulous(writer: MarkerWriter, marker: Marker, partition: Any, on_written: Any) -> None:
        end(writer, marker._replace(is_commit=True), partition, on_written)

    patch.setattr(MarkerWriter, "_end_offsets", credulous)


def ignore_the_last_stable_offset(patch: Any) -> None:
    """Readers of committed records read up to the high watermark."""
    patch.setattr(PartitionLog, "last_stable_offset", property(lambda log: log.high_watermark))


def forget_aborted_ranges(patch: Any) -> None:
    """A fetch does not say which transactions were aborted."""
    patch.setattr(PartitionLog, "aborted_transactions", lambda log, *bounds: [])


def fence_nobody(patch: Any) -> None:
    """The coordinator believes a producer whatever its epoch is."""
    exact = transitions.end_v2

    def credulous(current: Any, producer: Any, *rest: Any, **more: Any) -> Any:
        return exact(current, current.identity, *rest, **more)

    patch.setattr(transitions, "_identity_error", lambda current, producer: ErrorCode.NONE)
    patch.setattr(transitions, "end_v2", credulous)


def verify_nothing(patch: Any) -> None:
    """A batch enters the log without a word to the transaction's coordinator."""

    def silent(
        verifier: CoordinatorVerifier,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        partitions: Any,
        *,
        adds: bool,
    ) -> Any:
        return dict.fromkeys(partitions, ErrorCode.NONE)

    patch.setattr(CoordinatorVerifier, "verify", silent)


def forget_what_was_prepared(patch: Any) -> None:
    """A new coordinator does not send the markers of transactions that were decided before it."""
    loaded = TransactionCoordinator.on_loaded

    def forgetful(coordinator: TransactionCoordinator, now: Now) -> Outcome:
        outcome = loaded(coordinator, now)
        outcome.messages.clear()
        return outcome

    patch.setattr(TransactionCoordinator, "on_loaded", forgetful)
