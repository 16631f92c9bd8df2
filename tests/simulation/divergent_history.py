"""The histories of one log again, with leaders elsewhere: its truncations are those of a replica that diverged.

Each start is an election. What follows a truncation may be of an older epoch that this log has not had yet: the next
leader has it where an earlier leader's records went no further than to that one. Invariant: no epoch has two histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.simulation.storage_history import History
from tests.simulation.storage_model import AppendedBatch

WEIGHTS = {"truncate": 8, "maintain": 2, "end_process": 3}


class DivergentHistory(History):
    """`used`: the epochs of which there was a record, and those in which this log led."""

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, **settings: Any) -> None:
        super().__init__(seed, WEIGHTS | dict(weights or {}), **settings)
        self.used: set[int] = set()

    def open(self) -> None:
        super().open()
        self._elect(max(self.used, default=0) + self.rng.randint(1, 3))
        if self.rng.random() < 0.7:
            self.log.assign_epoch(self.epoch)
            self.used.add(self.epoch)

    def truncate(self) -> None:
        end_offset = self.log.log_end_offset
        super().truncate()
        if self.log.log_end_offset < end_offset:
            first = self.model.batches[-1].leader_epoch if self.model.batches else 0
            above = max(self.used) + 1
            self._elect(self.rng.choice([epoch for epoch in range(first, above + 1) if epoch not in self.used]))

    def _elect(self, epoch: int) -> None:
        """Follow another replica, which has no record of the epochs that began here at the end."""
        self.epoch = epoch
        self.log.leader_epochs.truncate_from_end(self.log.log_end_offset)

    def write(self, batch: AppendedBatch, *, from_client: bool = True) -> None:
        self.used.add(self.epoch)
        super().write(batch, from_client=from_client)
