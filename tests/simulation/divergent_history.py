"""The histories of one log again, with leaders elsewhere: its truncations are those of a replica that diverged.

Each start is an election. What follows a truncation is appended as from a leader, and may be of an older epoch that
this log has not had yet: the next leader has it where an earlier leader's records went no further than to that one.
Invariant: no epoch has two histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.simulation.storage_history import History
from tests.simulation.storage_model import AppendedBatch
from tidelog.storage.log.partition_log import AppendInfo

WEIGHTS = {"truncate": 8, "maintain": 2, "end_process": 3}


class DivergentHistory(History):
    """`used`: the epochs of which there was a record, and those in which this log led. `leads`: whether it does now."""

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, **settings: Any) -> None:
        super().__init__(seed, WEIGHTS | dict(weights or {}), **settings)
        self.used: set[int] = set()
        self.leads = False

    def open(self) -> None:
        super().open()
        self._elect(max(self.used, default=0) + self.rng.randint(1, 3))
        self.leads = self.rng.random() < 0.7
        if self.leads:
            self.log.assign_epoch(self.epoch)
            self.used.add(self.epoch)

    def truncate(self) -> None:
        end_offset = self.log.log_end_offset
        super().truncate()
        is_empty = self.log.log_start_offset == self.log.log_end_offset
        if is_empty:
            self.checkpoint()  # no epoch is left to confirm an earlier log start
            self.used.add(self.epoch)  # the file has it from here on: no other replica leads in it
        if self.log.log_end_offset < end_offset or is_empty:
            first = 0 if is_empty or not self.model.batches else self.model.batches[-1].leader_epoch
            above = max(self.used, default=0) + 1
            self._elect(self.rng.choice([epoch for epoch in range(first, above + 1) if epoch not in self.used]))

    def _elect(self, epoch: int) -> None:
        """Follow another replica, which has no record of the epochs that began here at the end."""
        self.epoch, self.leads = epoch, False
        self.log.leader_epochs.truncate_from_end(self.log.log_end_offset)

    def write(self, batch: AppendedBatch, *, from_client: bool = True) -> None:
        self.used.add(self.epoch)
        super().write(batch, from_client=from_client)

    def put(self, batch: AppendedBatch, buffer: bytearray, *, from_client: bool) -> AppendInfo:
        if self.leads:
            return super().put(batch, buffer, from_client=from_client)
        buffer[:] = batch.data
        info = self.log.append_as_follower(memoryview(buffer), self.now_ms)
        assert info is not None
        return info

    def fill_disk(self) -> None:
        if self.log.log_start_offset < self.log.log_end_offset:  # else the append may begin the log anew, in part
            super().fill_disk()
