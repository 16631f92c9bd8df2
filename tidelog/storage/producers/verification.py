"""Verifications of transactions by their coordinator, before their first batch in a partition (KIP-890).

A batch that would open a transaction waits until the coordinator has confirmed it. The transaction may end before the
confirmation arrives, so a marker ends the verification, and the batch is refused. Pure. Invariant: each producer has at
most one verification, and a batch is appended only with the present one. Follows Kafka's VerificationStateEntry and
VerificationGuard.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Bound for one partition. A new verification replaces the oldest, whose batch is then refused.
VERIFICATIONS_MAX: Final = 10_000


class Verification:
    """The verification of one producer, compared by identity.

    `adds`: the coordinator adds the partition to the transaction (transaction version 2). `lowest_sequence`: that of
    the waiting batches of `producer_epoch`; a later batch must not overtake them.
    """

    __slots__ = ("adds", "lowest_sequence", "producer_epoch", "since_ms")

    def __init__(self, producer_epoch: int, sequence: int, adds: bool, now_ms: int) -> None:
        self.producer_epoch = producer_epoch
        self.lowest_sequence = sequence
        self.adds = adds
        self.since_ms = now_ms

    def note(self, producer_epoch: int, sequence: int) -> None:
        """Another batch waits for the verification."""
        if producer_epoch > self.producer_epoch:
            self.producer_epoch, self.lowest_sequence = producer_epoch, sequence
        elif producer_epoch == self.producer_epoch and sequence < self.lowest_sequence:
            self.lowest_sequence = sequence


class Verifications:
    """The verifications of one partition, by producer id."""

    __slots__ = ("_under_way",)

    def __init__(self) -> None:
        self._under_way: dict[int, Verification] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def get(self, producer_id: int) -> Verification | None:
        return self._under_way.get(producer_id)

    def begin(self, producer_id: int, producer_epoch: int, sequence: int, adds: bool, now_ms: int) -> Verification:
        """The producer's present verification, or a new one."""
        verification = self._under_way.get(producer_id)
        if verification is not None:
            verification.note(producer_epoch, sequence)
            return verification
        if len(self._under_way) >= VERIFICATIONS_MAX:
            del self._under_way[next(iter(self._under_way))]
        verification = self._under_way[producer_id] = Verification(producer_epoch, sequence, adds, now_ms)
        return verification

    def holds(self, producer_id: int, verification: Verification | None) -> bool:
        """Whether `verification` is the producer's present one."""
        return verification is not None and self._under_way.get(producer_id) is verification

    def end(self, producer_id: int) -> None:
        """End the verification: a batch of the transaction is in the log."""
        self._under_way.pop(producer_id, None)

    def end_by_marker(self, producer_id: int, producer_epoch: int) -> None:
        """A marker is in the log: end the verification of its transaction.

        With transaction version 2 each transaction has its own epoch, so a marker of the verification's epoch belongs
        to the transaction before it.
        """
        verification = self._under_way.get(producer_id)
        if verification is not None and not (verification.adds and producer_epoch == verification.producer_epoch):
            del self._under_way[producer_id]

    def remove_expired(self, now_ms: int, expiration_ms: int) -> None:
        expired = [key for key, each in self._under_way.items() if now_ms - each.since_ms >= expiration_ms]
        for producer_id in expired:
            del self._under_way[producer_id]


class TransactionAppend(NamedTuple):
    """The transaction data of an append.

    `verification`: allows a batch to open the transaction. `transaction_version`: the client's, for a marker.
    """

    verification: Verification | None = None
    transaction_version: int = 0
