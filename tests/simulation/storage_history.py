"""One seeded history of a log directory on the simulated disk: work, crashes, starts, and what must hold after each.

Everything that happens follows from the seed. `History(seed).run()` raises `Broken`, or whatever the code under test
raised, with the seed and the steps taken as a note, and the same seed does it again. With flush.messages=1 an offset
counts as acknowledged as soon as the log calls it committable, otherwise when a flush that covers it was finished.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.simulation.log_history import LogHistory
from tests.simulation.simulated_disk import PowerLoss
from tests.simulation.storage_invariants import INVARIANTS, Broken
from tests.simulation.storage_model import AppendedBatch, LogModel
from tidelog.protocol.batches.records import (
    ControlRecordType,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
)
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import AppendInfo, PartitionLog
from tidelog.storage.log.saved_rows import save_index_rows
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

TOPIC = "t"
PATH = "/data/logs"
STEPS = 40
PRODUCERS = 4
TRANSACTIONAL = (100, 101)


class History(LogHistory):
    """`steps`: what was done, for the report of a failure. `weights` and `settings` take the place of how
    often an action is chosen and of what is drawn for the log's configuration."""

    step_count, strike, strike_operations, strike_start = STEPS, 0.06, 12, 0.15
    model: LogModel

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, **settings: Any) -> None:
        super().__init__(seed, weights, (*range(PRODUCERS), *TRANSACTIONAL))
        self.epoch = 0
        rng = self.rng
        self.config = LogConfig(
            segment_bytes=rng.choice((1000, 1500, 4000)),
            segment_ms=rng.choice((500, 7 * 86_400_000)),
            index_interval_bytes=rng.choice((0, 128, 400)),
            segment_index_bytes=rng.choice((64, 4096)),
            flush_messages=rng.choice((1, 1, 1, 4, INT64_MAX)),
            retention_bytes=rng.choice((-1, -1, 3000)),
            file_delete_delay_ms=rng.choice((0, 1000)),
            message_timestamp_after_max_ms=INT64_MAX,
            producer_id_expiration_ms=INT64_MAX,
            cleanup_policy=frozenset({"delete"}),
            preallocate=rng.random() < 0.1,
        )
        self.config = replace(self.config, **settings)
        self.model = LogModel()
        self.flushing: FlushTask | None = None
        self.directory: LogDirectory
        self.log: PartitionLog
        self.actions: list[tuple[Callable[[], None], int]] = [
            (self.append, 20),
            (self.append_transactional, 6),
            (self.end_transaction, 4),
            (self.flush, 6),
            (self.begin_flush, 4),
            (self.finish_flush, 6),
            (self.checkpoint, 2),
            (self.maintain, 3),
            (self.delete_records, 2),
            (self.truncate, 2),
            (self.fill_disk, 1),
            (self.end_process, 1),
            (self.restart_cleanly, 1),
            (self.lose_power, 1),
        ]

    def finish(self) -> None:
        self.survive(self.restart_cleanly)

    # Starting

    def open(self) -> None:
        self.flushing = None
        self.directory = LogDirectory.open(self.disk, PATH, node_id=1, cluster_id=None)
        if self.machine_ran_on and not self.directory.was_clean:
            self.directory.ending = Ending.KILLED
        logs = self.directory.load(lambda topic: self.config, self.now_ms)
        if self.directory.offline:
            raise Broken(f"EveryLogOpens: {self.directory.offline}")
        found = logs.get((TOPIC, 0))
        if found is None:
            if self.model.promised_end > self.model.promised_start:
                raise Broken("AcknowledgedRecordsArePresent: the whole log is gone")
            self.model = LogModel()
            found = self.directory.create_log(TOPIC, 0, bytes(15) + b"\x07", self.config, self.now_ms)
        self.log = found
        self.adopt()
        self.epoch += self.rng.randint(0, 1)
        self.log.assign_epoch(max(self.epoch, self.log.leader_epochs.latest))
        self.epoch = self.log.leader_epochs.latest

    def adopt(self) -> None:
        """Check the log against the model, then let the model forget what was lost without having been promised."""
        log, model = self.log, self.model
        if model.doubtful is not None:
            model.append(model.doubtful)
            model.doubtful = None
        if model.lowest_cut is not None:
            model.promised_end = min(model.promised_end, model.lowest_cut)
            model.kept_end = min(model.kept_end, model.lowest_cut)
            model.lowest_cut = None
        for invariant in INVARIANTS[:3]:
            invariant.check(log, model, self.rng)
        model.kept_end = 0
        model.batches = [batch for batch in model.batches if batch.last_offset < log.log_end_offset]
        model.log_start = log.log_start_offset
        log.set_high_watermark(log.log_end_offset)
        for invariant in INVARIANTS[3:]:
            invariant.check(log, model, self.rng)
        self.model.promised_end = min(model.promised_end, log.log_end_offset)
        self.promise()
        self.adopt_producers()
        self.is_open = True

    # What a broker does

    def write(self, batch: AppendedBatch, *, from_client: bool = True) -> None:
        buffer = bytearray(batch.sent)
        batch.base_offset = self.log.log_end_offset
        batch.last_offset = batch.base_offset + len(batch.timestamps) - 1
        batch.leader_epoch = self.epoch
        stamped = bytearray(batch.sent)
        stamped[0:8] = batch.base_offset.to_bytes(8, "big")
        stamped[12:16] = self.epoch.to_bytes(4, "big")
        batch.data = bytes(stamped)
        self.model.doubtful = batch
        try:
            info = self.put(batch, buffer, from_client=from_client)
        except OSError:
            self.model.doubtful = None
            return
        self.model.doubtful = None
        if info.duplicate or info.first_offset != batch.base_offset or bytes(buffer) != batch.data:
            raise Broken(f"AppendIsAnswered: {info} for offset {batch.base_offset}")
        self.model.append(batch)
        self.now_ms += self.rng.randint(0, 40)
        if batch.ends is None and batch.producer_id >= 0:
            self.sequences[batch.producer_id] = batch.base_sequence + len(batch.timestamps)
            if batch.is_transactional:
                self.transactions.add(batch.producer_id)
        elif batch.ends is not None:
            self.transactions.discard(batch.producer_id)
        self.promise()

    def put(self, batch: AppendedBatch, buffer: bytearray, *, from_client: bool) -> AppendInfo:
        """Append the batch, which is in the buffer as a client sends it. Raises OSError."""
        return self.log.append_as_leader(memoryview(buffer), self.epoch, self.now_ms, from_client=from_client)

    def _data(self, producer_id: int, is_transactional: bool) -> AppendedBatch:
        rng = self.rng
        count = rng.choice((1, 1, 2, 5))
        timestamps = [self.now_ms + rng.randint(-30, 30) for _ in range(count)]
        sequence = self.sequences.get(producer_id, 0) if producer_id >= 0 else -1
        epoch = self.producer_epochs[producer_id] if producer_id >= 0 else -1
        records = [(timestamp, None, rng.randbytes(rng.choice((3, 40, 150))), ()) for timestamp in timestamps]
        sent = encode_batch(
            records,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=is_transactional,
        )
        return AppendedBatch(0, 0, b"", bytes(sent), 0, timestamps, producer_id, epoch, sequence, is_transactional)

    def append(self) -> None:
        self.write(self._data(self.rng.choice((-1, *range(PRODUCERS))), False))

    def append_transactional(self) -> None:
        self.write(self._data(self.rng.choice(TRANSACTIONAL), True))

    def end_transaction(self) -> None:
        if not self.transactions:
            return
        producer_id = self.rng.choice(sorted(self.transactions))
        is_abort = self.rng.random() < 0.6
        kind = ControlRecordType.ABORT if is_abort else ControlRecordType.COMMIT
        epoch = self.log.producers.entries[producer_id].epoch
        sent = encode_control_batch(
            kind, encode_end_txn_value(0), timestamp=self.now_ms, producer_id=producer_id, producer_epoch=epoch
        )
        batch = AppendedBatch(0, 0, b"", bytes(sent), 0, [self.now_ms], producer_id, epoch, -1, True, is_abort)
        self.write(batch, from_client=False)

    def begin_flush(self) -> None:
        if self.flushing is None and self.log.flush_due:
            self.flushing = self.log.begin_flush()
            if self.rng.random() < 0.7:
                self.flushing.run()
                self._has_run = True
            else:
                self._has_run = False

    _has_run = False

    def finish_flush(self) -> None:
        if self.flushing is None:
            return
        task, self.flushing = self.flushing, None
        if not self._has_run:
            task.run()
        self.log.finish_flush(task)
        self.model.promised_end = max(self.model.promised_end, self.log.recovery_point)
        self.promise()

    def flush(self) -> None:
        self.finish_flush()
        if self.rng.random() < 0.05:
            self.disk.fail_after(self.rng.randint(1, 5))  # between one sync of a flush and the next
        if self.rng.random() < 0.05:
            self.fail_sync()
            return
        self.log.flush()
        self.model.promised_end = max(self.model.promised_end, self.log.log_end_offset)
        self.log.set_high_watermark(self.log.log_end_offset)

    def fail_sync(self) -> None:
        """A device that cannot sync takes the log offline; the operator restarts the node."""
        self.disk.sync_fails = True
        try:
            self.log.flush()
        except OSError:
            self.steps.append("SYNC FAILED")
            self.start_again()
        else:
            self.disk.sync_fails = False

    def checkpoint(self) -> None:
        start = self.log.log_start_offset
        for _ in save_index_rows(self.directory.logs):
            pass
        self.directory.write_checkpoints()
        self.model.promised_start = start

    def maintain(self) -> None:
        self.now_ms += self.rng.choice((0, 600, 5000))
        self.log.set_high_watermark(self.log.log_end_offset)
        self.model.log_start = max(self.model.log_start, self.log.log_end_offset)  # retention may take all it likes
        self.directory.maintain(self.now_ms)
        self.model.log_start = self.log.log_start_offset
        self.model.forgotten_below = max(self.model.forgotten_below, self.model.log_start)

    def delete_records(self) -> None:
        self.log.set_high_watermark(self.log.log_end_offset)
        span = self.log.log_end_offset - self.log.log_start_offset
        target = self.log.log_start_offset + self.rng.randint(0, span)
        self.model.log_start = max(self.model.log_start, target)
        self.model.forgotten_below = max(self.model.forgotten_below, target)
        self.log.delete_records(target)

    def truncate(self) -> None:
        if self.rng.random() < 0.7:
            self.finish_flush()
        reach = self.rng.choice((6, 6, 40))
        candidates = [batch for batch in self.model.batches[-reach:] if batch.base_offset >= self.log.log_start_offset]
        if not candidates or self.rng.random() < 0.3:
            return
        batch = self.rng.choice(candidates)
        target = self.rng.choice((batch.base_offset, batch.last_offset))
        self.model.lowest_cut = batch.base_offset
        self.log.truncate_to(target)
        self.model.lowest_cut = None
        self.model.cut_from(target)
        if self.log.log_end_offset != max(self.model.end, self.model.log_start):
            raise Broken(f"TruncationEndsAtABatch: {self.log.log_end_offset} instead of {self.model.end}")
        self.epoch += 1
        self.log.assign_epoch(self.epoch)
        self.adopt()

    def fill_disk(self) -> None:
        """A write is refused, and room is made again."""
        self.disk.full = True
        before = self.log.log_end_offset
        try:
            self.write(self._data(-1, False))
        except OSError:
            pass  # a roll found no room for its files
        self.disk.full = False
        self.model.doubtful = None
        if self.log.log_end_offset != before:
            raise Broken("AFullDiskRefuses: the log grew")

    def end_process(self) -> None:
        self.steps.append("PROCESS ENDED")
        self.model.kept_end = self.log.log_end_offset
        self.machine_ran_on = True
        self.disk.end_process()
        self.open()

    def lose_power(self) -> None:
        raise PowerLoss

    def restart_cleanly(self) -> None:
        self.finish_flush()
        self.directory.sync_at_once_from = self.rng.choice((1, 32))
        end = self.log.log_end_offset
        self.directory.close()
        self.model.promised_end = end
        self.model.promised_start = self.log.log_start_offset
        self.open()
        if not self.directory.was_clean:
            raise Broken("ACleanEndIsKnown: the marker is missing")
