"""What a log must be: the batches that were appended, and what was promised about them. No file, no index, no cache.

The storage simulation keeps one beside every log it drives, and the invariants compare the two. Invariant: the batches
are those of one timeline; what a crash took from the tail is taken from the model too, so nothing of an older timeline
can pass for right.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class AppendedBatch:
    """`data` as stamped by the log, `sent` by the producer; `ends`: does it abort a transaction? None: it is data."""

    base_offset: int
    last_offset: int
    data: bytes
    sent: bytes
    leader_epoch: int
    timestamps: list[int]
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    is_transactional: bool = False
    ends: bool | None = None

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1


@dataclass(slots=True)
class ModelProducer:
    epoch: int
    last: AppendedBatch | None = None
    transaction_first_offset: int = -1


@dataclass(slots=True)
class LogModel:
    """`promised_end`: everything below it was acknowledged under flush.messages=1, or covered by a finished flush.
    `promised_start`: the log start that a checkpoint made durable. `kept_end`: what the page cache must still hold at
    the next start, after the process alone ended. `doubtful`: an append that the crash interrupted. `lowest_cut`:
    where a truncation that the crash interrupted would have ended. `forgotten_below`: the highest log start ever; who
    wrote only below it need not be remembered, even if a crash takes the log start back."""

    batches: list[AppendedBatch] = field(default_factory=list)
    log_start: int = 0
    forgotten_below: int = 0
    promised_end: int = 0
    promised_start: int = 0
    kept_end: int = 0
    doubtful: AppendedBatch | None = None
    lowest_cut: int | None = None

    @property
    def end(self) -> int:
        return self.batches[-1].next_offset if self.batches else self.log_start

    def append(self, batch: AppendedBatch) -> None:
        self.batches.append(batch)

    def cut_from(self, offset: int) -> None:
        """Batches that reach `offset` are gone."""
        while self.batches and self.batches[-1].last_offset >= offset:
            self.batches.pop()
        self.promised_end = min(self.promised_end, self.end)

    def producers(self) -> dict[int, ModelProducer]:
        """The producers as the retained batches tell them."""
        found: dict[int, ModelProducer] = {}
        for batch in self.batches:
            if batch.producer_id < 0 or batch.last_offset < max(self.log_start, self.forgotten_below):
                continue
            producer = found.setdefault(batch.producer_id, ModelProducer(batch.producer_epoch))
            if producer.epoch != batch.producer_epoch:
                producer.epoch, producer.last = batch.producer_epoch, None
            if batch.ends is not None:
                producer.transaction_first_offset = -1
            else:
                producer.last = batch
                if batch.is_transactional and producer.transaction_first_offset < 0:
                    producer.transaction_first_offset = batch.base_offset
        return found

    def aborted(self) -> set[tuple[int, int, int]]:
        """(producer id, first offset, marker offset) of the aborted transactions that began in retained batches."""
        open_since: dict[int, int] = {}
        found = set()
        for batch in self.batches:
            if batch.ends is None:
                if batch.is_transactional:
                    open_since.setdefault(batch.producer_id, batch.base_offset)
            elif (first := open_since.pop(batch.producer_id, None)) is not None and batch.ends:
                found.add((batch.producer_id, first, batch.base_offset))
        return found

    def first_at_or_after(self, timestamp: int) -> tuple[int, int] | None:
        """(timestamp, offset) of the first retained record that is not older."""
        for batch in self.batches:
            for number, found in enumerate(batch.timestamps):
                if found >= timestamp and batch.base_offset + number >= self.log_start:
                    return found, batch.base_offset + number
        return None
