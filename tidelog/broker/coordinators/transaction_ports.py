"""The interface between the transaction coordinator's service and the part of the node that sends its markers.

Invariant: all calls come from the loop thread, and all callbacks run there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol


class MarkerToSend(NamedTuple):
    """The end of one transaction in the partitions that it wrote to."""

    log_partition: int  # the partition of __transaction_state that holds the transaction
    coordinator_epoch: int  # the leader epoch of that partition
    producer_id: int
    producer_epoch: int
    is_commit: bool
    transaction_version: int  # of the client that wrote (KIP-1228)
    partitions: frozenset[tuple[str, int]]


class MarkerSender(Protocol):
    """Sends WriteTxnMarkers to the leaders of partitions."""

    def send(self, marker: MarkerToSend, on_done: Callable[[frozenset[tuple[str, int]]], None]) -> None:
        """Send the marker again and again until each of its partitions has it.

        `on_done` names partitions that have the marker, or need none: their topic is deleted, or they know a later
        epoch of the producer. It may be called several times, but not before this call returns. A second send for the
        same producer id is legal and replaces nothing.
        """

    def cancel(self, log_partition: int) -> None:
        """Drop the markers of a partition of __transaction_state that this node no longer leads."""
