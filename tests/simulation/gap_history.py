"""One seeded history of a log with gaps of offsets on a simulated disk: what a leader and a follower append, cleanings,
truncations to any boundary, changes of the policy, kills and losses of power at any operation, and starts.

As `compaction_history`. There the only gaps are those of its own cleaner. Here a leader's cleaner has left gaps, too,
some of which are too large for an index, and a topic that is not compacted has those that all replicas have. Nothing
is damaged but by kills and losses of power: so nothing may count as damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.simulation.compaction_history import DELETE_RETENTION_MS, CompactionHistory
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
from tidelog.broker.replicas.hosting import _set_config
from tidelog.protocol.batches.record_batch import LEADER_EPOCH_OFFSET
from tidelog.replication.truncation import compacted_below
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.log_config import MAX_RELATIVE_OFFSET
from tidelog.storage.segments.reader import headers

POLICIES = ({"compact"}, {"compact"}, {"compact", "delete"}, {"delete"})


@dataclass(slots=True)
class GapModel(CompactedModel):
    """`written`: the batches of an append that a crash interrupted. `may_be_removed_below`: behind it nothing was ever
    cleaned. `gap_ends`: where the log may end behind a gap, without the batch behind it."""

    written: list[KeyedBatch] = field(default_factory=list)
    may_be_removed_below: int = 0
    gap_ends: set[int] = field(default_factory=set)


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


class SegmentsAreWhole:
    """Batches lie within their segments and are of the log's epochs, segments with batches end where the next one
    begins, empty ones hold a gap, and index rows are true.
    """

    def check(self, log: PartitionLog, model: GapModel, now_ms: int, rng: Random) -> None:
        segments = list(log.segments)
        for number, segment in enumerate(segments):
            places: dict[int, int] = {}
            offset = segment.base_offset
            for position, header in headers(segment):
                places[header.last_offset] = position
                require(header.base_offset >= offset, self, f"{segment.path}: {header.base_offset} after {offset}")
                offset = header.next_offset
                known = log.leader_epochs.epoch_for_offset(max(header.base_offset, log.log_start_offset))
                is_known = known == header.partition_leader_epoch or offset <= log.log_start_offset
                require(is_known, self, f"{segment.path}: epoch {known} at {header.base_offset}")
            if number + 1 < len(segments):
                following = segments[number + 1].base_offset
                is_gap = segment.may_end_early and not segment.size_bytes
                where = f"{segment.path} ends at {offset}, the next begins at {following}"
                require(offset == following or is_gap, self, where)
            for offset, position in segment.offset_index.rows():
                require(places.get(offset) == position, self, f"{segment.path}: row {offset} -> {position}")


AT_REST = (
    NothingIsInvented(), EveryKeyKeepsItsNewest(), NothingIsPassedOver(), TheCleanPartIsClean(),
    ProducersAreRemembered(),
)  # fmt: skip
AFTER_A_START = (
    AcknowledgedRecordsArePresent(), NothingIsLeftBehind(), NothingCountsAsDamaged(), SegmentsAreWhole(), *AT_REST,
)  # fmt: skip


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
        more: list[tuple[Callable[[], None], int]] = [
            (self.follow, 20),
            (self.change_policy, 3 if self.changes_policy else 0),
        ]
        self.actions += more

    def new_model(self) -> GapModel:
        return GapModel(DELETE_RETENTION_MS)

    def draw_policy(self) -> None:
        self.config = replace(self.config, cleanup_policy=frozenset(self.rng.choice(POLICIES)))

    # Starting

    def open(self) -> None:
        self.leads = False
        if self.changes_policy and self.rng.random() < 0.1:  # while the node was down
            self.draw_policy()
        super().open()

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
        model.gap_ends = {log.log_end_offset}
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
        super().write(batch, count, from_client=from_client)

    def follow(self) -> None:
        """Some batches of a leader, whose cleaner has left gaps between them."""
        rng, log = self.rng, self.log
        if self.leads:
            self.leads = False
            self.epoch += 1
        parts: list[bytes] = []
        written: list[KeyedBatch] = []
        end, explained, sequences = log.log_end_offset, 0, dict(self.sequences)
        for _ in range(rng.choice((1, 1, 2, 3))):
            batch, count = self._data(rng.choice((-1, -1, *range(3))), False)
            gap = self.gap(end)
            if batch.producer_id >= 0:
                if any(each.producer_id == batch.producer_id for each in written):
                    continue
                sequences[batch.producer_id] = batch.base_sequence + count
            self.epoch += rng.choice((0, 0, 0, 0, 1, 2))
            batch.base_offset, batch.leader_epoch = end + gap, self.epoch
            batch.last_offset = batch.base_offset + count - 1
            explained = batch.base_offset if gap else explained
            data = bytearray(batch.sent)
            data[0:8] = batch.base_offset.to_bytes(8, "big")
            data[LEADER_EPOCH_OFFSET : LEADER_EPOCH_OFFSET + 4] = batch.leader_epoch.to_bytes(4, "big")
            batch.data = bytes(data)
            end = batch.next_offset
            parts.append(batch.data)
            written.append(batch)
        if explained and not log.config.is_compacted:
            log.explain_gaps(explained)
        self.model.written = written
        log.append_as_follower(memoryview(bytearray(b"".join(parts))), self.now_ms)
        self.model.written = []
        self.model.batches += written
        self.sequences = sequences
        require(log.log_end_offset == end, self, f"the log ends at {log.log_end_offset}, not {end}")
        self.now_ms += rng.randint(0, 40)
        self.promise()
        log.set_high_watermark(rng.choice((log.high_watermark, end, *(each.next_offset for each in written))))

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
        _set_config(self.log, self.config, self.directory, set())
        if self.compaction is not None and self.compaction.is_given_up:
            self.compaction.run()
            self.compaction.advance()
            self.compaction = None

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
        model.lowest_cut = min(target, before)
        model.gap_ends.add(batch.base_offset)
        log.truncate_to(target)
        model.lowest_cut = None
        model.cut_from(target)
        ends = (model.end, batch.base_offset, log.log_start_offset)
        require(log.log_end_offset in ends, self, f"the log ends at {log.log_end_offset}, not at one of {ends}")
        model.may_be_removed_below = min(model.may_be_removed_below, log.log_end_offset)
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
