"""At which brokers' addresses a refused connection means that the process is gone. Pure.

An address proves itself by accepting a connection from this controller, in the broker's present epoch: one that never
did may lead elsewhere from here (a name for clients, a firewall that rejects). A refusal is believed once in an epoch:
a broker that lives on in the same epoch shows that it was wrong.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from tidelog.replication.ports import Endpoint


class Proof(NamedTuple):
    epoch: int
    endpoint: Endpoint
    is_spent: bool = False
    """A refusal was believed already."""


class ProvenAddresses:
    def __init__(self) -> None:
        self._proofs: dict[int, Proof] = {}

    def accepted(self, broker_id: int, epoch: int, endpoint: Endpoint) -> None:
        """A connection was made there."""
        if not self.is_known(broker_id, epoch, endpoint):
            self._proofs[broker_id] = Proof(epoch, endpoint)

    def is_known(self, broker_id: int, epoch: int, endpoint: Endpoint) -> bool:
        proof = self._proofs.get(broker_id)
        return proof is not None and proof[:2] == (epoch, endpoint)

    def believes_refusal(self, broker_id: int, epoch: int, endpoint: Endpoint) -> bool:
        return self.is_known(broker_id, epoch, endpoint) and not self._proofs[broker_id].is_spent

    def spend(self, broker_id: int) -> None:
        """The broker is fenced because its address refused."""
        proof = self._proofs.get(broker_id)
        if proof is not None:
            self._proofs[broker_id] = proof._replace(is_spent=True)

    def keep_only(self, broker_ids: Container[int]) -> None:
        for broker_id in [one for one in self._proofs if one not in broker_ids]:
            del self._proofs[broker_id]
