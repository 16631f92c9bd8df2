"""One seeded history of a log with gaps of offsets on a simulated disk: what a leader and a follower append, cleanings,
truncations to any boundary, changes of the policy, kills and losses of power at any operation, and starts.

As `compaction_history`. There the only gaps are those of its own cleaner. Here a leader's cleaner has left gaps, too,
some of which are too large for an index, and a topic that is not compacted has those that all replicas have. Another
replica, which was never cleaned, may replace the first segments. Nothing is damaged but by kills and losses of power:
so nothing may count as damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

from tests.simulation import compaction_model
from tests.simulation.compaction_history import (
    DELETE_RETENTION_MS,
    PRODUCERS,
    TRANSACTIONAL,
    CompactionHistory,
)
from tests.simulation.compaction_model import (
    CompactedModel,
    EveryKeyKeepsItsNewest,
    KeyedBatch,
    NothingIsInvented,
    NothingIsLeftBehind,
    ProducersAreRemembered,
    TheCleanPartIsClean,
    read_committed,
)
from tests.simulation.storage_invariants import Broken, require
from tidelog.protocol.batches.record_batch import LEADER_EPOCH_OFFSET
from tidelog.protocol.batches.records import ControlRecordType, encode_control_batch, encode_end_txn_value
from tidelog.replication.truncation import compacted_below
from tidelog.storage.cleaner.filter import filler
from tidelog.storage.files import checkpoints
from tidelog.storage.log.compaction import CleaningFailed
from tidelog.storage.log.flush import FlushTask
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.log.verification import SNAPSHOT, LogFacts, StoppedLog
from tidelog.storage.segments.log_config import MAX_RELATIVE_OFFSET
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import Segment


def stamped(batch: KeyedBatch) -> bytes:
    data = bytearray(batch.sent)
    data[0:8] = batch.base_offset.to_bytes(8, "big")
    data[LEADER_EPOCH_OFFSET : LEADER_EPOCH_OFFSET + 4] = batch.leader_epoch.to_bytes(4, "big")
    return bytes(data)


POLICIES = ({"compact"}, {"compact"}, {"compact", "delete"}, {"delete"})


@dataclass(slots=True)
class GapModel(CompactedModel):
    """`written`: the batches of an append that a crash interrupted. `may_be_removed_below`: behind it nothing was ever
    cleaned. `ends_before`: base offset -> where the log ended before the batch. `deleted_below`: the highest log start
    ever. `gap_ends`: where the log may end behind a gap, without the batch behind it."""

    written: list[KeyedBatch] = field(default_factory=list)
    may_be_removed_below: int = 0
    gap_ends: set[int] = field(default_factory=set)
    ends_before: dict[int, int] = field(default_factory=dict)
    deleted_below: int = 0


class AcknowledgedRecordsArePresent:
    """What was promised is in the log."""

    def check(self, log: PartitionLog, model: GapModel, now_ms: int, rng: Random) -> None:
        end, promised = log.log_end_offset, max(model.promised_end, model.kept_end)
        require(end >= promised, self, f"the log ends at {end}, {promised} was promised")
        ends = {each for batch in model.batches for each in (batch.base_offset, batch.next_offset)} | model.gap_ends
        require(end in ends or end <= log.log_start_offset, self, f"the log ends at {end}, no batch does")


class NothingCountsAsDamaged:
    """Neither after a start nor after each segment was read."""

    def check(self, log: PartitionLog, model: GapModel, now_ms: int, rng: Random) -> None:
        found = log.damaged_ranges()
        require(not found, self, f"{found} of {list(log.segments)}")
        for segment in list(log.segments):
            scrub = Scrub(log, segment)
            while not scrub.is_done:
                scrub.run(10_000)
            scrub.finish()
        found = log.damaged_ranges()
        require(not found, self, f"{found} of {list(log.segments)}, by a scrub")


class NothingIsPassedOver:
    """Each record that no cleaner may have removed is read."""

    def check(self, log: PartitionLog, model: GapModel, now_ms: int, rng: Random) -> None:
        found = {offset for offset, _ in read_committed(log, rng.choice((1, 300, 100_000)))}
        wanted = {offset for offset, _, _ in model.visible(log) if offset >= model.may_be_removed_below}
        missing = sorted(wanted - found)
        require(not missing, self, f"{missing[:5]} of {list(log.segments)}")


class SegmentsAreWhole(compaction_model.SegmentsAreWhole):
    """Empty ones may hold a gap."""

    def may_end_early(self, segment: Segment) -> bool:
        return segment.may_end_early and not segment.size_bytes


class NoGapIsExplainedBehindTheEnd:
    """Other records may come there: a follower would miss those that another replica in sync has in the gap."""

    def check(self, log: PartitionLog, model: GapModel, now_ms: int, rng: Random) -> None:
        explained, end = log.gaps_explained_below, log.log_end_offset
        require(explained <= end, self, f"gaps are explained below {explained}, the log ends at {end}")


class EpochsBeginNoLater:
    """A leader epoch begins where the log ended before it, or, where the batches before it are gone, further before: a
    follower would keep records of another history behind that.
    """

    def check(self, log: PartitionLog, model: GapModel, now_ms: int, rng: Random) -> None:
        starts = dict(log.leader_epochs)
        model.deleted_below = max(model.deleted_below, log.log_start_offset)
        for before, batch in pairwise(model.batches):
            start = starts.get(batch.leader_epoch, 0)
            latest = max(model.ends_before[batch.base_offset], model.deleted_below)
            is_later = before.leader_epoch < batch.leader_epoch and start > latest
            require(not is_later, self, f"epoch {batch.leader_epoch} begins at {start}, not at {latest}")


AT_REST = (
    NothingIsInvented(), EveryKeyKeepsItsNewest(), NothingIsPassedOver(), TheCleanPartIsClean(),
    ProducersAreRemembered(),
)  # fmt: skip
AFTER_A_START = (
    AcknowledgedRecordsArePresent(), NothingIsLeftBehind(), NothingCountsAsDamaged(), SegmentsAreWhole(),
    EpochsBeginNoLater(), NoGapIsExplainedBehindTheEnd(), *AT_REST,
)  # fmt: skip


def picture(log: PartitionLog) -> tuple[object, ...]:
    """What a start has found."""
    batches = [(header.base_offset, header.next_offset) for segment in log.segments for _, header in headers(segment)]
    segments = [(each.base_offset, each.next_offset) for each in log.segments if each.size_bytes]
    return log.log_start_offset, log.log_end_offset, segments, batches


class GapHistory(CompactionHistory):
    """`steps`: what was done, for the report of a failure. `weights` and `settings` as for `CompactionHistory`."""

    model: GapModel

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, **settings: Any) -> None:
        super().__init__(seed, weights, **settings)
        rng = self.rng
        self.changes_policy = rng.random() < 0.3
        if "cleanup_policy" not in settings:
            self.draw_policy()
        self.config = replace(self.config, preallocate=settings.get("preallocate", rng.random() < 0.1))
        self.leads = True
        self.copies = 0
        self.flushing: FlushTask | None = None
        more: list[tuple[Callable[[], None], int]] = [
            (self.follow, 20),
            (self.follow_on_a_full_disk, 1),
            (self.begin_flush, 2),
            (self.finish_flush, 3),
            (self.empty, 1),
            (self.copy_prefix, 2),
            (self.change_policy, 3 if self.changes_policy else 0),
        ]
        self.actions += more

    def new_model(self) -> GapModel:
        return GapModel(DELETE_RETENTION_MS)

    def draw_policy(self) -> None:
        self.config = replace(self.config, cleanup_policy=frozenset(self.rng.choice(POLICIES)))

    # Starting

    def open(self) -> None:
        if self.crashes:
            self.model.deleted_below = max(self.model.deleted_below, self.log.log_start_offset)
        self.leads = False
        self.epoch += 1  # what was lost may have been of the latest one, with other batches
        if self.changes_policy and self.rng.random() < 0.1:  # while the node was down
            self.draw_policy()
        self.flushing = None
        super().open()
        if self.log.topic_id is None:  # as the broker does
            self.directory.set_topic_id("t", 0, bytes(15) + b"\x07")
        if not self.directory.was_clean and self.rng.random() < 0.2:
            self.open_again()

    def open_again(self) -> None:
        """The process is killed at once: a second start finds what the first one has left."""
        self.steps.append("STARTED AGAIN")
        self.log.assign_epoch(self.epoch)
        before = picture(self.log)
        self.disk.end_process()
        self.machine_ran_on = True
        super().open()
        after = picture(self.log)
        require(before == after, self, f"a second start finds {after}, the first one had {before}")

    def adopt(self) -> None:
        """Check the log against the model, then let the model forget what was lost without having been promised."""
        log, model = self.log, self.model
        model.batches += model.written if model.doubtful is None else [model.doubtful]
        model.written, model.doubtful = [], None
        if model.lowest_cut is not None:
            model.promised_end = min(model.promised_end, model.lowest_cut)
            model.kept_end = min(model.kept_end, model.lowest_cut)
            model.lowest_cut = None
        AFTER_A_START[0].check(log, model, self.now_ms, self.rng)
        model.kept_end = 0
        model.batches = [batch for batch in model.batches if batch.last_offset < log.log_end_offset]
        model.gap_ends = {each for each in model.gap_ends if each < log.log_end_offset} | {log.log_end_offset}
        model.promised_end = min(model.promised_end, log.log_end_offset)
        high_watermark = log.high_watermark
        log.set_high_watermark(log.log_end_offset)
        for invariant in AFTER_A_START[1:]:
            invariant.check(log, model, self.now_ms, self.rng)
        if self.rng.random() < 0.3:  # what a start knows
            bound = max(high_watermark, model.may_be_removed_below)
            ends = [each for batch in model.batches for each in (batch.base_offset, batch.next_offset) if each >= bound]
            log.high_watermark = min(ends, default=log.log_end_offset)
        self.promise()
        self.adopt_producers()
        self.is_open = True

    def promise(self) -> None:
        """What is acknowledged: no record lies in a gap that is acknowledged."""
        if self.config.flush_messages == 1:
            ends = [each.next_offset for each in self.model.batches]
            promised = max((each for each in ends if each <= self.log.committable_offset), default=0)
            self.model.promised_end = max(self.model.promised_end, promised)

    def look(self) -> None:
        for invariant in AT_REST:
            invariant.check(self.log, self.model, self.now_ms, self.rng)

    # Appending

    def write(self, batch: KeyedBatch, count: int, *, from_client: bool = True) -> None:
        if not self.leads:
            self.leads = True
            self.epoch += 1
            self.log.assign_epoch(self.epoch)
        self.model.ends_before[self.log.log_end_offset] = self.log.log_end_offset
        super().write(batch, count, from_client=from_client)
        batch.data = stamped(batch)

    def follow(self) -> None:
        """Some batches of a leader, whose cleaner has left gaps between them."""
        rng, log = self.rng, self.log
        if self.leads:
            self.leads = False
            self.epoch += 1
        parts: list[bytes] = []
        written: list[KeyedBatch] = []
        end, explained = log.log_end_offset, 0
        for _ in range(rng.choice((1, 1, 2, 3))):
            batch, count = self.leaders_batch()
            gap = self.gap(end)
            self.epoch += rng.choice((0, 0, 0, 0, 1, 2))
            batch.base_offset, batch.leader_epoch = end + gap, self.epoch
            self.model.ends_before[end + gap] = end
            batch.last_offset = batch.base_offset + count - 1
            explained = batch.base_offset if gap else explained
            batch.data = stamped(batch)
            end = batch.next_offset
            parts.append(batch.data)
            written.append(batch)
        self.model.written = written
        try:
            if explained and not log.config.is_compacted:
                log.explain_gaps(explained)
            log.append_as_follower(memoryview(bytearray(b"".join(parts))), self.now_ms)
        except OSError:
            self.meet_full_disk()
            return
        self.model.written = []
        self.model.batches += written
        require(log.log_end_offset == end, self, f"the log ends at {log.log_end_offset}, not {end}")
        self.now_ms += rng.randint(0, 40)
        self.promise()
        log.set_high_watermark(rng.choice((log.high_watermark, end, *(each.next_offset for each in written))))

    def meet_full_disk(self) -> None:
        """A part of the batches may have been appended. The leader sends the others again."""
        log, model = self.log, self.model
        require(self.disk.full, self, "the disk is not full")
        self.disk.full = False
        model.batches += [each for each in model.written if each.last_offset < log.log_end_offset]
        model.written = []
        model.gap_ends.add(log.log_end_offset)
        ends = {log.log_start_offset, *model.gap_ends, *(each.next_offset for each in model.batches)}
        require(log.log_end_offset in ends, self, f"the log ends at {log.log_end_offset}")
        self.adopt_producers()
        self.look()

    def follow_on_a_full_disk(self) -> None:
        self.disk.full = True
        self.follow()
        self.disk.full = False

    def leaders_batch(self) -> tuple[KeyedBatch, int]:
        rng = self.rng
        if self.transactions and rng.random() < 0.15:
            producer_id = rng.choice(sorted(self.transactions))
            self.transactions.discard(producer_id)
            is_abort = rng.random() < 0.5
            kind = ControlRecordType.ABORT if is_abort else ControlRecordType.COMMIT
            epoch = self.producer_epochs[producer_id]
            sent = encode_control_batch(
                kind, encode_end_txn_value(0), timestamp=self.now_ms, producer_id=producer_id, producer_epoch=epoch
            )
            return KeyedBatch(0, 0, b"", bytes(sent), 0, [self.now_ms], producer_id, epoch, -1, True, is_abort), 1
        if rng.random() < 0.1:  # what its cleaner has left of the last batch of a segment
            return KeyedBatch(0, 0, b"", bytes(filler(0, 0).data), 0, []), 1
        is_transactional = rng.random() < 0.2
        producer_id = rng.choice(TRANSACTIONAL if is_transactional else (-1, -1, *range(PRODUCERS)))
        batch, count = self._data(producer_id, is_transactional)
        if producer_id >= 0:
            self.sequences[producer_id] = batch.base_sequence + count
        if is_transactional:
            self.transactions.add(producer_id)
        return batch, count

    def gap(self, end: int) -> int:
        """How many offsets are missing before the next batch."""
        rng = self.rng
        in_index = self.log.segments.active.base_offset + MAX_RELATIVE_OFFSET - end
        return rng.choice(
            (0, 0, 0, 0, 0, rng.randint(1, 5), rng.randint(1, 5), 2**31 + rng.randint(0, 9),
             MAX_RELATIVE_OFFSET - rng.randint(-1, 7), max(0, in_index - rng.randint(-1, 7)), 2**33)
        )  # fmt: skip

    # What else happens to a log

    def change_policy(self) -> None:
        self.draw_policy()
        self.reconfigure()

    def clean_a_little(self) -> None:
        if self.compaction is None:
            if not self.log.config.is_compacted:
                return
            self.directory.enter_in_cleaner_checkpoint(self.log)  # as the node's cleaner does
            bound = self.log.segments.active.base_offset
            self.model.may_be_removed_below = max(self.model.may_be_removed_below, bound)
        super().clean_a_little()

    def truncate(self) -> None:
        """As a follower is cut. What may have been cleaned is cut above the high watermark only (`truncate_copy`)."""
        log, model, rng = self.log, self.model, self.rng
        bound = min(max(log.high_watermark, log.cleaned_offset), compacted_below(log))
        bound = max(bound, log.log_start_offset)
        candidates = [batch for batch in model.batches if batch.base_offset >= bound]
        if not candidates:
            return
        batch = rng.choice(candidates)
        before = max((each.next_offset for each in model.batches if each.next_offset <= batch.base_offset), default=0)
        target = rng.choice((batch.base_offset, batch.base_offset, batch.last_offset, max(before, bound)))
        if rng.random() < 0.7:
            self.finish_flush()
        model.lowest_cut = min(target, before)
        model.gap_ends.add(batch.base_offset)
        log.truncate_to(target)
        model.lowest_cut = None
        model.cut_from(target)
        ends = {model.end, batch.base_offset, log.log_start_offset, *model.gap_ends}
        require(log.log_end_offset in ends, self, f"the log ends at {log.log_end_offset}, not at one of {ends}")
        model.may_be_removed_below = min(model.may_be_removed_below, log.log_end_offset)
        self.after_a_cut()

    def after_a_cut(self) -> None:
        log = self.log
        if self.compaction is not None:  # as the cleaner does when the piece that was under way has returned
            self.compaction.run()
            if self.compaction.advance():
                raise Broken("ACutLogIsNotCleanedOn: it goes on")
            self.compaction = None
        high_watermark = log.high_watermark
        self.adopt()
        log.high_watermark = high_watermark
        self.epoch += 1
        log.assign_epoch(self.epoch)

    def begin_flush(self) -> None:
        if self.flushing is None:
            self.flushing = self.log.begin_flush()
            if self.rng.random() < 0.5:
                self.flushing.run()

    def finish_flush(self) -> None:
        if self.flushing is not None:
            task, self.flushing = self.flushing, None
            task.run()
            self.log.finish_flush(task)
            self.model.promised_end = max(self.model.promised_end, self.log.durability.recovery_point)
            self.promise()

    def flush(self) -> None:
        self.finish_flush()
        super().flush()

    def checkpoint(self) -> None:
        if self.rng.random() < 0.3:
            super().checkpoint()
            return
        task = self.directory.begin_checkpoints()
        task.run()
        if self.directory.finish_checkpoints(task):
            task.sync()
            self.directory.finish_synced_checkpoints(task, self.now_ms)

    def restart_cleanly(self) -> None:
        self.finish_flush()
        end = self.log.log_end_offset
        self.directory.close()
        self.verify()
        self.model.promised_end = end
        self.open()
        if not self.directory.was_clean:
            raise Broken("ACleanEndIsKnown: the marker is missing")

    def verify(self) -> None:
        """The files of a stopped node have no problem."""
        offsets = {}
        for name in (
            checkpoints.RECOVERY_POINT_FILE, checkpoints.HIGH_WATERMARK_FILE, checkpoints.LOG_START_FILE,
            checkpoints.CLEANER_OFFSET_FILE,
        ):  # fmt: skip
            data = checkpoints.read_if_exists(self.disk, f"{self.directory.path}/{name}")
            offsets[name] = checkpoints.decode_offsets(data or b"").get(("t", 0), -1)
        recovery_point, high_watermark, log_start, cleaned = offsets.values()
        facts = LogFacts(
            True, recovery_point, high_watermark, max(log_start, 0), self.config.is_compacted or cleaned >= 0,
            cleaned_offset=cleaned,
        )  # fmt: skip
        stopped = StoppedLog(self.disk, self.log.directory, facts)
        problems = [each for each in stopped.verify() if each.kind != SNAPSHOT]  # a loss of power empties some
        stopped.release()
        require(not problems, self, f"{problems}")

    def delete_records(self) -> None:
        super().delete_records()
        self.model.deleted_below = max(self.model.deleted_below, self.log.log_start_offset)

    def empty(self) -> None:
        """As of a follower whose log is of another history, or which its leader has left behind."""
        log, model, rng = self.log, self.model, self.rng
        self.finish_flush()
        target = rng.choice((log.log_start_offset, log.log_end_offset + self.gap(log.log_end_offset)))
        model.lowest_cut = 0
        log.truncate_fully_and_start_at(target)
        self.model = self.new_model()
        self.model.gap_ends = {target}
        self.after_a_cut()

    def copy_prefix(self) -> None:
        """Another replica, which never was cleaned, replaces the log's first segments."""
        log = self.log
        if not log.config.is_compacted or self.compaction is not None or self.flushing is not None:
            return
        bound = min(log.high_watermark, self.model.batches[-1].base_offset if self.model.batches else 0)
        last = [each for each in list(log.segments)[:-1] if each.next_offset <= bound]
        if not last:
            return
        self.directory.enter_in_cleaner_checkpoint(log)
        copy = PrefixCopy(log, self.rng.choice(last), self.now_ms)
        if self.rng.random() < 0.3:
            self.disk.fail_after(self.rng.randint(1, 60))
        try:
            while True:
                wanted = copy.wants_from
                others = [stamped(each) for each in self.model.batches if each.last_offset >= wanted >= 0]
                copy.data = b"".join(others[: self.rng.choice((1, 3, 100))])
                copy.run()
                if not copy.advance():
                    break
        except CleaningFailed as error:
            raise Broken(f"ACopyIsTaken: {error}") from error
        self.copies += 1
        self.look()
