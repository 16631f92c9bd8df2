"""One seeded history of a compacted log on the simulated disk: appends, cleanings, crashes at any step of them, starts.

As `storage_history`, with the cleaner in the place of what that one looks at more closely. A cleaning goes on a piece
at a time between everything else, so that appends, truncations, retention and crashes meet it wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tests.simulation.compaction_model import AFTER_A_START, AT_REST, CompactedModel, Kept, KeyedBatch
from tests.simulation.log_history import LogHistory
from tests.simulation.simulated_disk import PowerLoss
from tests.simulation.storage_invariants import Broken
from tidelog.broker.replicas.hosting import _set_config
from tidelog.protocol.batches.records import ControlRecordType, encode_batch, encode_control_batch, encode_end_txn_value
from tidelog.storage.cleaner.keys import BYTES_PER_KEY, PlainKeyTable
from tidelog.storage.log.compaction import Compaction, find_cleanable
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

TOPIC = "t"
PATH = "/data/logs"
STEPS = 60
PRODUCERS = 3
TRANSACTIONAL = (100, 101)
DELETE_RETENTION_MS = 400
STRUCK_SWAPS = 0.15
"""How many of the swaps are to be cut short by a loss of power."""


class CompactionHistory(LogHistory):
    """`steps`: what was done, for the report of a failure. `weights` and `settings` as for `History`."""

    step_count, strike, strike_operations, strike_start = STEPS, 0.08, 15, 0.25
    model: CompactedModel

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, **settings: Any) -> None:
        super().__init__(seed, weights, (*range(PRODUCERS), *TRANSACTIONAL))
        rng = self.rng
        self.cleanings = self.swaps_cut_short = 0
        policies = ({"compact"}, {"compact"}, {"compact", "delete"})
        self.config = LogConfig(
            segment_bytes=rng.choice((500, 1000, 3000)),
            segment_ms=rng.choice((200, 7 * 86_400_000)),
            index_interval_bytes=rng.choice((0, 128, 400)),
            flush_messages=rng.choice((1, 4, INT64_MAX)),
            retention_bytes=rng.choice((-1, 4000)),
            retention_ms=-1,
            file_delete_delay_ms=rng.choice((0, 1000)),
            message_timestamp_after_max_ms=INT64_MAX,
            producer_id_expiration_ms=INT64_MAX,
            delete_retention_ms=DELETE_RETENTION_MS,
            min_cleanable_dirty_ratio=0.0,
            cleanup_policy=frozenset(rng.choice(policies)),
        )
        self.config = replace(self.config, **settings)
        self.keys = rng.choice((3, 8, 30))
        self.epoch = 0
        self.model = self.new_model()
        self.compaction: Compaction | None = None
        self.strays: list[str] = []
        self.directory: LogDirectory
        self.log: PartitionLog
        self.actions: list[tuple[Callable[[], None], int]] = [
            (self.append, 20),
            (self.append_transactional, 5),
            (self.end_transaction, 4),
            (self.roll, 3),
            (self.clean_a_little, 20),
            (self.clean, 4),
            (self.flush, 3),
            (self.checkpoint, 2),
            (self.maintain, 3),
            (self.truncate, 1),
            (self.delete_records, 1),
            (self.wait, 3),
            (self.look, 3),
            (self.end_process, 1),
            (self.restart_cleanly, 1),
            (self.lose_power, 1),
            (self.leave_stray, 0),
        ]

    def finish(self) -> None:
        self.survive(self.restart_cleanly)
        self.survive(self.roll)
        self.survive(self.clean)
        self.survive(self.look)

    # Starting

    def open(self) -> None:
        if self.log_is_in_a_swap():
            self.swaps_cut_short += 1
        self.compaction = None
        self.strays.clear()
        self.directory = LogDirectory.open(self.disk, PATH, node_id=1, cluster_id=None)
        if self.machine_ran_on and not self.directory.was_clean:
            self.directory.ending = Ending.KILLED
        logs = self.directory.load(lambda topic: self.config, self.now_ms)
        if self.directory.offline:
            raise Broken(f"EveryLogOpens: {self.directory.offline}")
        found = logs.get((TOPIC, 0))
        if found is None:
            if self.model.promised_end:
                raise Broken("AcknowledgedRecordsArePresent: the whole log is gone")
            self.model = self.new_model()
            found = self.directory.create_log(TOPIC, 0, bytes(15) + b"\x07", self.config, self.now_ms)
        self.log = found
        self.adopt()
        self.epoch += self.rng.randint(0, 1)
        self.log.assign_epoch(self.epoch)

    def new_model(self) -> CompactedModel:
        return CompactedModel(DELETE_RETENTION_MS)

    def reconfigure(self) -> None:
        """Give the log the present `config`, as a node does when that of the topic has changed."""
        _set_config(self.log, self.config, self.directory, set())
        if self.compaction is not None and self.compaction.is_given_up:
            self.compaction.run()
            self.compaction.advance()
            self.compaction = None

    def log_is_in_a_swap(self) -> bool:
        compaction = self.compaction
        return compaction is not None and compaction._swap is not None and compaction._swap.has_begun

    def adopt(self) -> None:
        """Check the log against the model, then let the model forget what was lost without having been promised."""
        log, model = self.log, self.model
        if model.doubtful is not None:
            model.batches.append(model.doubtful)
            model.doubtful = None
        if model.lowest_cut is not None:
            model.promised_end = min(model.promised_end, model.lowest_cut)
            model.kept_end = min(model.kept_end, model.lowest_cut)
            model.lowest_cut = None
        AFTER_A_START[0].check(log, model, self.now_ms, self.rng)
        model.kept_end = 0
        model.batches = [batch for batch in model.batches if batch.last_offset < log.log_end_offset]
        model.promised_end = min(model.promised_end, log.log_end_offset)
        log.set_high_watermark(log.log_end_offset)
        for invariant in AFTER_A_START[1:]:
            invariant.check(log, model, self.now_ms, self.rng)
        self.promise()
        self.adopt_producers()
        self.is_open = True

    # Appending

    def write(self, batch: KeyedBatch, count: int, *, from_client: bool = True) -> None:
        batch.base_offset = self.log.log_end_offset
        batch.last_offset = batch.base_offset + count - 1
        self.model.doubtful = batch
        batch.leader_epoch = self.epoch
        info = self.log.append_as_leader(
            memoryview(bytearray(batch.sent)), self.epoch, self.now_ms, from_client=from_client
        )
        self.model.doubtful = None
        if info.duplicate or info.first_offset != batch.base_offset:
            raise Broken(f"AppendIsAnswered: {info} for offset {batch.base_offset}")
        self.model.batches.append(batch)
        self.now_ms += self.rng.randint(0, 40)
        if batch.ends is not None:
            self.transactions.discard(batch.producer_id)
        elif batch.producer_id >= 0:
            self.sequences[batch.producer_id] = batch.base_sequence + count
            if batch.is_transactional:
                self.transactions.add(batch.producer_id)
        self.promise()
        ends = [b.next_offset for b in self.model.batches[-4:] if b.next_offset >= self.log.high_watermark]
        self.log.set_high_watermark(self.rng.choice([*ends, ends[-1]]))

    def _data(self, producer_id: int, is_transactional: bool) -> tuple[KeyedBatch, int]:
        rng = self.rng
        count = rng.choice((1, 1, 2, 6))
        records = [
            Kept(
                b"k%d" % rng.randrange(self.keys),
                None if rng.random() < 0.15 else rng.randbytes(rng.choice((3, 20, 60))),
                self.now_ms + rng.randint(-30, 30),
            )
            for _ in range(count)
        ]
        sequence = self.sequences.get(producer_id, 0) if producer_id >= 0 else -1
        epoch = self.producer_epochs[producer_id] if producer_id >= 0 else -1
        sent = encode_batch(
            [(record.timestamp, record.key, record.value, ()) for record in records],
            compression=rng.choice((0, 0, 0, 4)),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=is_transactional,
        )
        timestamps = [record.timestamp for record in records]
        batch = KeyedBatch(
            0, 0, b"", bytes(sent), 0, timestamps, producer_id, epoch, sequence, is_transactional,
            records=records, appended_ms=self.now_ms,
        )  # fmt: skip
        return batch, count

    def append(self) -> None:
        self.write(*self._data(self.rng.choice((-1, *range(PRODUCERS))), False))

    def append_transactional(self) -> None:
        self.write(*self._data(self.rng.choice(TRANSACTIONAL), True))

    def end_transaction(self) -> None:
        if not self.transactions:
            return
        producer_id = self.rng.choice(sorted(self.transactions))
        is_abort = self.rng.random() < 0.5
        kind = ControlRecordType.ABORT if is_abort else ControlRecordType.COMMIT
        epoch = self.log.producers.entries[producer_id].epoch
        sent = encode_control_batch(
            kind, encode_end_txn_value(0), timestamp=self.now_ms, producer_id=producer_id, producer_epoch=epoch
        )
        batch = KeyedBatch(0, 0, b"", bytes(sent), 0, [self.now_ms], producer_id, epoch, -1, True, is_abort)
        self.write(batch, 1, from_client=False)

    def roll(self) -> None:
        self.log.set_high_watermark(self.log.log_end_offset)
        self.log.roll(self.now_ms)

    # Cleaning

    def clean_a_little(self) -> None:
        if self.compaction is None:
            chosen = find_cleanable(self.log, self.now_ms)
            if not chosen.cleanable_bytes:
                return
            memory_bytes = BYTES_PER_KEY * self.rng.choice((2, 10, 1000))
            piece_bytes = self.rng.choice((61, 200))
            self.compaction = Compaction(
                self.log, chosen, lambda: PlainKeyTable(memory_bytes, 1.0), self.now_ms, piece_bytes=piece_bytes
            )
        for _ in range(self.rng.choice((1, 1, 2, 5, 20))):
            self.compaction.run()
            if self.rng.random() < 0.1 and self.log_is_in_a_swap():
                self.look()
            if self.compaction._ready and self.rng.random() < STRUCK_SWAPS:
                self.disk.fail_after(self.rng.randint(1, 20))
            if not self.compaction.advance():
                self.cleanings += not self.compaction.is_given_up
                self.compaction = None
                return

    def clean(self) -> None:
        """One cleaning to its end."""
        self.clean_a_little()
        while self.compaction is not None:
            self.clean_a_little()

    def look(self) -> None:
        for invariant in AT_REST:
            invariant.check(self.log, self.model, self.now_ms, self.rng)

    def leave_stray(self) -> None:
        """A `.cleaned` file of a cleaning that ended early, anywhere in the log."""
        if self.compaction is None:  # as long as there is one, no other makes files
            base_offset = self.rng.randint(0, self.log.log_end_offset) * self.rng.choice((0, 1))
            for kind in self.rng.choice(((".log",), (".index",), (".log", ".index", ".timeindex"))):
                path = f"{self.log.directory}/{base_offset:020d}{kind}.cleaned"
                self.strays.append(path)
                self.disk.write_file(path, b"", sync=self.rng.random() < 0.5)

    # What else happens to a log

    def wait(self) -> None:
        self.now_ms += self.rng.choice((50, DELETE_RETENTION_MS, 1000))

    def flush(self) -> None:
        self.log.flush()
        self.model.promised_end = max(self.model.promised_end, self.log.log_end_offset)

    def checkpoint(self) -> None:
        self.directory.write_checkpoints()

    def maintain(self) -> None:
        self.now_ms += self.rng.choice((0, 100, 2000))
        self.directory.maintain(self.now_ms)

    def truncate(self) -> None:
        """As a follower is cut: only what the high watermark never reached."""
        candidates = [batch for batch in self.model.batches if batch.base_offset >= self.log.high_watermark]
        if not candidates:
            return
        batch = self.rng.choice(candidates)
        self.model.lowest_cut = batch.base_offset
        self.log.truncate_to(batch.base_offset)
        self.model.lowest_cut = None
        self.model.cut_from(batch.base_offset)
        if self.compaction is not None:  # as the cleaner does when the piece that was under way has returned
            self.compaction.run()
            if self.compaction.advance():
                raise Broken("ACutLogIsNotCleanedOn: it goes on")
            self.compaction = None
        high_watermark = self.log.high_watermark
        for path in self.strays:  # `adopt` finds none, as after a start
            self.disk.remove(path)
        self.adopt()
        self.log.high_watermark = high_watermark
        self.epoch += 1
        self.log.assign_epoch(self.epoch)

    def delete_records(self) -> None:
        if self.config.is_deleted_by_age_or_size:
            low, high = self.log.log_start_offset, self.log.high_watermark
            self.log.delete_records(low + int(self.rng.random() * (high - low) / 2))

    def end_process(self) -> None:
        self.steps.append("PROCESS ENDED")
        self.model.kept_end = self.log.log_end_offset
        self.machine_ran_on = True
        self.disk.end_process()
        self.open()

    def lose_power(self) -> None:
        raise PowerLoss

    def restart_cleanly(self) -> None:
        end = self.log.log_end_offset
        self.directory.close()
        self.model.promised_end = end
        self.open()
        if not self.directory.was_clean:
            raise Broken("ACleanEndIsKnown: the marker is missing")
