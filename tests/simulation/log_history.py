"""What histories of one log on the simulated disk have in common: actions drawn by weight, losses of power, starts.

A subclass says what is done (`actions`), how a directory is opened and checked (`open`), and what follows the last
step (`finish`). Everything that happens follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from tests.simulation.simulated_disk import NEVER, PowerLoss, SimulatedDisk
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import LogConfig


class LogHistory:
    """`steps`: what was done, for the report of a failure. A step is struck with the chance `strike`, at one of its
    first `strike_operations` operations of the disk; a start with the chance `strike_start`."""

    step_count: int
    strike: float
    strike_operations: int
    strike_start: float
    config: LogConfig
    log: PartitionLog
    model: Any
    actions: list[tuple[Callable[[], None], int]]

    def __init__(self, seed: int, weights: Mapping[str, int] | None, producer_ids: Iterable[int]) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.weights = weights or {}
        self.steps: list[str] = []
        self.disk = SimulatedDisk(self.rng)
        self.now_ms = 1_000_000
        self.crashes = 0
        self.sequences: dict[int, int] = {}
        self.producer_epochs = dict.fromkeys(producer_ids, 0)
        self.transactions: set[int] = set()
        self.is_open = False

    def open(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        """The whole history. Raises Broken when an invariant does not hold."""
        try:
            self._run()
        except Exception as error:
            error.add_note(f"seed {self.seed}, after: {'; '.join(self.steps)}")
            raise

    def _run(self) -> None:
        self.survive(self.open)
        doers = [action for action, _ in self.actions]
        weights = [self.weights.get(action.__name__, weight) for action, weight in self.actions]
        for action in self.rng.choices(doers, weights, k=self.step_count):
            if self.rng.random() < self.strike:
                self.disk.fail_after(self.rng.randint(1, self.strike_operations))
            self.steps.append(action.__name__)
            self.survive(action)
        self.disk.fail_at = NEVER
        self.finish()

    machine_ran_on = False
    """Whether the process that wrote the log was only killed: no power was lost since it has opened the log."""

    def survive(self, action: Callable[[], None]) -> None:
        """Do it; a loss of power on the way is followed by a start, which may be struck too."""
        try:
            action()
        except PowerLoss:
            pending: Callable[[], None] = self.start_again
            while True:
                try:
                    pending()
                    return
                except PowerLoss:
                    continue

    def start_again(self) -> None:
        self.crashes += 1
        # A truncation cut short by the end of the process alone may, without a flush policy, be undone by a later loss
        # of power, as in Kafka: the two together are not tried.
        if self.rng.random() < 0.75 or self.model.lowest_cut is not None:
            self.steps.append("POWER LOST")
            self.disk.lose_power()
            self.model.kept_end = 0
            self.machine_ran_on = False
        else:
            self.steps.append("PROCESS ENDED")
            self.disk.end_process()
            self.model.kept_end = self.model.end if self.is_open else self.model.kept_end
            self.machine_ran_on = self.machine_ran_on or self.is_open
        self.is_open = False
        if self.rng.random() < self.strike_start:
            self.disk.fail_after(self.rng.randint(1, 30))
        self.open()
        self.disk.fail_at = NEVER

    def adopt_producers(self) -> None:
        """Producers whose sequence the log no longer knows go on in a new epoch, as real ones would have to."""
        entries = self.log.producers.entries
        self.transactions = {key for key, entry in entries.items() if entry.transaction_first_offset >= 0}
        for producer_id in self.producer_epochs:
            entry = entries.get(producer_id)
            if entry is not None and entry.batches:
                self.producer_epochs[producer_id] = entry.epoch
                self.sequences[producer_id] = entry.last_sequence + 1
            else:
                self.producer_epochs[producer_id] += 1
                self.sequences[producer_id] = 0

    def promise(self) -> None:
        if self.config.flush_messages == 1:
            self.model.promised_end = max(self.model.promised_end, self.log.committable_offset)
