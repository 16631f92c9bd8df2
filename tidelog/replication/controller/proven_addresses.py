"""The broker addresses at which a refused connection means that the process is gone. Pure.

An address is proven when it accepts a connection from this controller in the broker's present
epoch. An unproven address may lead elsewhere from this host (a name for clients, a firewall that
rejects). A refusal is trusted once in an epoch: a broker that lives on in the same epoch shows that
the refusal was wrong.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from tidelog.replication.ports import Endpoint


class Proof(NamedTuple):
    epoch: int
    endpoint: Endpoint
    is_spent: bool = False
    """A refusal was trusted before."""


class ProvenAddresses:
    def __init__(self) -> None:
        self._proofs: dict[int, Proof] = {}

    def add_proof(self, broker_id: int, epoch: int, endpoint: Endpoint) -> None:
        """The address has accepted a connection."""
        if not self.has_proof(broker_id, epoch, endpoint):
            self._proofs[broker_id] = Proof(epoch, endpoint)

    def has_proof(self, broker_id: int, epoch: int, endpoint: Endpoint) -> bool:
        proof = self._proofs.get(broker_id)
        return proof is not None and proof[:2] == (epoch, endpoint)

    def trusts_refusal(self, broker_id: int, epoch: int, endpoint: Endpoint) -> bool:
        return self.has_proof(broker_id, epoch, endpoint) and not self._proofs[broker_id].is_spent

    def mark_spent(self, broker_id: int) -> None:
        """The broker is fenced because its address has refused a connection."""
        proof = self._proofs.get(broker_id)
        if proof is not None:
            self._proofs[broker_id] = proof._replace(is_spent=True)

    def retain(self, broker_ids: Container[int]) -> None:
        for broker_id in [known_id for known_id in self._proofs if known_id not in broker_ids]:
            del self._proofs[broker_id]
