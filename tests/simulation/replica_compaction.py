"""Histories of the replicas of a compacted partition: each is cleaned at its own time and keeps each key's newest.

As `replica_places`, with keys, tombstones and the cleaner. A cleaning goes on a piece at a time between everything
else, so that elections, truncations, moves and crashes meet it wherever it stands. The copies differ in what their
cleaners have removed, and in nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from tests.simulation.replica_history import LAG_MS, content_of
from tests.simulation.replica_places import PlacesOfReplicas
from tests.simulation.replica_transactions import Producer
from tests.simulation.simulated_disk import PowerLoss
from tests.simulation.storage_invariants import Broken
from tests.unit.replication.replicas import ReplicaNode
from tidelog.broker.replicas.log_cleaner import ABSENCE_MS_MAX
from tidelog.protocol.batches.record import Record
from tidelog.storage.cleaner.keys import BYTES_PER_KEY, PlainKeyTable
from tidelog.storage.log.compaction import CleaningFailed, Compaction, find_cleanable
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import CorruptIndex

TOMBSTONE_EVERY = 7
DELETED_BACK = 9
"""A tombstone deletes the key of so many records before it: a replica that is away may have it, and miss this."""
STRUCK_SWAPS = 0.1
"""How many of the swaps are to be cut short."""
CLEANED_STEPS_MAX = 100_000


class CompactedReplicas(PlacesOfReplicas):
    """The number of a record decides on its key, and on whether it is a tombstone."""

    def options(self) -> dict[str, str]:
        self.key_count = self.rng.choice((2, 5, 20, 10**9))
        self.delete_retention_ms = self.rng.choice((0, 1000, 10**9))
        self.cleanup_policy = self.rng.choice(("compact", "compact", "compact,delete"))
        self.struck_swaps = STRUCK_SWAPS
        self.keys_at_once: tuple[int, ...] = (1, 2, 1000)
        self.removable: set[bytes] = set()
        """Of transactions that are or will be aborted, and markers: the cleaner may remove them."""
        self.doubtful: set[bytes] = set()
        """Of transactions from before an unclean election: of some the end may be lost, and they are aborted later."""
        self.written_ms: dict[bytes, int] = {}
        """When each record was sent first."""
        self.compactions: dict[ReplicaNode, Compaction] = {}
        return super().options()

    def topic_configs(self) -> dict[str, str]:
        return {
            **super().topic_configs(),
            "internal_segment_bytes": self.rng.choice(("300", "300", "1000")),
            "cleanup_policy": self.cleanup_policy,
            "delete_retention_ms": str(self.delete_retention_ms),
        }

    def actions_drawn(self) -> dict[Callable[[], None], int]:
        drawn = {**super().actions_drawn(), self.clean_a_little: 40, self.clean: 6, self.be_away_for_long: 6}
        # Behind an unclean election a deleted key may come back: half of the histories have none.
        return drawn | {self.delete: 3, self.produce: 20, self.elect_uncleanly: self.rng.choice((0, 8))}

    # ---------------------------------------------------------------------------------------------------- the records

    def record_of(self, number: int, now_ms: int, value: bytes) -> Record:
        self.written_ms.setdefault(value, now_ms)
        if self.is_tombstone(value):
            return Record(number, now_ms, self.key_of(value), None, (("number", value),))
        return Record(number, now_ms, self.key_of(value), value)

    def key_of(self, value: bytes) -> bytes:
        number = int(value) - DELETED_BACK if self.is_tombstone(value) else int(value)
        return b"k%d" % ((number * 2654435761 % 2**32 >> 16) % self.key_count)

    def is_tombstone(self, value: bytes) -> bool:
        return int(value) % TOMBSTONE_EVERY == 0

    def is_keyed(self, value: bytes) -> bool:
        """Whether it is a record of data, and not a marker's."""
        return value in self.written_ms

    def newest(self, found: Mapping[int, bytes]) -> dict[bytes, int]:
        """Key -> the offset of its newest record, but those of aborted transactions."""
        return {
            self.key_of(value): offset
            for offset, value in sorted(found.items())
            if self.is_keyed(value) and value not in self.removable
        }

    def may_lack(self, offset: int, value: bytes, found: Mapping[int, bytes]) -> bool:
        if super().may_lack(offset, value, found) or offset < self.deleted_to:
            return True
        if offset in found:
            return False
        if not self.is_keyed(value) or value in self.removable or value in self.doubtful:
            return True
        if self.newest(found).get(self.key_of(value), -1) > offset:
            self.uses["superseded"] += 1
            return True
        horizon_ms = self.cluster.loop.now_s * 1000 - self.delete_retention_ms
        return any(
            self.is_tombstone(other) and self.key_of(other) == self.key_of(value) and at_ms <= horizon_ms
            for other, at_ms in self.written_ms.items()
            if int(other) >= int(value)
        )

    def agree_on(self, contents: Mapping[int, Mapping[int, bytes]]) -> bool:
        """What two copies have at an offset is the same; where one has none, its cleaner may have removed it."""
        everything: dict[int, bytes] = {}
        for content in contents.values():
            for offset, value in content.items():
                if everything.setdefault(offset, value) != value:
                    return False
        return all(
            self.may_lack(offset, value, content)
            for content in contents.values()
            for offset, value in everything.items()
            if offset not in content
        )

    def elect_uncleanly(self) -> None:
        self.doubtful |= self.transactional
        self.removable -= self.doubtful
        super().elect_uncleanly()

    def forget(self, producer: Producer) -> None:
        if producer.is_abort is False:  # its marker may be there
            self.doubtful |= producer.values
        else:
            self.removable |= producer.values - self.doubtful

    # ------------------------------------------------------------------------------------------------------ the cleaner

    def clean_a_little(self) -> None:
        for node in list(self.compactions):
            if self.nodes.get(node.id) is not node or node.disk.is_off:
                del self.compactions[node]  # a start finds its files
        hosting = sorted(self.hosting)
        if hosting:
            self.clean_on(self.nodes[self.rng.choice(hosting)], self.rng.choice((1, 2, 5, 20)))

    def clean(self) -> None:
        """One cleaning to its end, on each node."""
        for node in list(self.hosting.values()):
            with suppress(PowerLoss):
                self.clean_on(node, CLEANED_STEPS_MAX)

    def run_for_long(self, duration_ms: float) -> None:
        """The cleaner's threads return meanwhile: a move waits for a cleaning that was given up."""
        for node, compaction in list(self.compactions.items()):
            if compaction.is_given_up and self.nodes.get(node.id) is node and not node.disk.is_off:
                with suppress(PowerLoss):
                    self.clean_on(node, 1)
        super().run_for_long(duration_ms)

    def be_away_for_long(self) -> None:
        """A replica ends, and comes back when the others have written and been cleaned several times."""
        if len(self.hosting) < 2:
            return
        for _ in self.producers:  # no cleaner gets past an open transaction
            self.end_transaction()
        away = self.rng.choice(sorted(self.hosting))
        self.let_flushes_end(self.nodes[away])
        if self.nodes[away].disk.is_off:
            return
        self.end_node(away, self.rng.choice(("stopped", "killed")))
        if self.leader is None:
            self.elect_from_isr()
        self.shrink()
        former, self.keys_at_once = self.keys_at_once, (1000,)
        for _ in range(8):
            self.produce()
            self.run_for_long(LAG_MS)
            self.note_answers()
            self.clean()
        self.keys_at_once = former
        self.uses["away for long"] += 1
        if away not in self.nodes:
            self.start_node(away)

    def start_node(self, node_id: int) -> None:
        placed = self.cluster.placed
        if node_id in placed.adding_replicas and node_id not in placed.isr and len(placed.isr) > 1:
            self.kept.pop(node_id, None)  # its copy begins again: it may be a former one
        super().start_node(node_id)

    def clean_on(self, node: ReplicaNode, steps: int) -> None:
        compaction = self.compactions.get(node) or self.begin(node)
        if compaction is None:
            return
        log = compaction.log
        for _ in range(steps):
            compaction.run()
            if compaction._ready and self.rng.random() < self.struck_swaps:
                node.disk.fail_after(self.rng.randint(1, 20))
            try:
                goes_on = compaction.advance()
            except CleaningFailed as error:
                raise Broken(f"EveryLogIsCleaned: node {node.id}: {error}") from error
            if not goes_on:
                self.steps.append(f"{node.id} was cleaned below {log.cleaned_offset}")
                self.uses["given up" if compaction.is_given_up else "cleaned"] += 1
                del self.compactions[node]
                node.checkpoint()
                return

    def begin(self, node: ReplicaNode) -> Compaction | None:
        log: PartitionLog = node.log
        if not log.may_be_cleaned or log.failure is not None or log.compaction is not None:
            return None
        try:
            chosen = find_cleanable(log, node.clock_ms())
        except CorruptIndex as error:
            raise Broken(f"EveryLogIsCleaned: node {node.id}: {error}") from error
        if not chosen.cleanable_bytes:
            return None
        memory_bytes = BYTES_PER_KEY * self.rng.choice(self.keys_at_once)
        now_ms = node.clock_ms()
        begun = Compaction(
            log, chosen, lambda: PlainKeyTable(memory_bytes, 1.0), now_ms,
            piece_bytes=self.rng.choice((61, 200, 10_000)), removes_until_ms=self.removes_until_ms(node, now_ms),
        )  # fmt: skip
        self.compactions[node] = begun
        node.checkpoint()
        self.steps.append(f"{node.id} is cleaned from {chosen.first_dirty_offset} to {chosen.end_offset}")
        return begun

    def removes_until_ms(self, node: ReplicaNode, now_ms: int) -> int:
        return now_ms if node.hosting.is_on_all_replicas(node.log) else now_ms - ABSENCE_MS_MAX

    def delete(self) -> None:
        if "delete" in self.cleanup_policy:
            super().delete()

    def finish(self) -> None:
        self.struck_swaps = 0.0
        super().finish()
        for node in self.hosting.values():
            node.log.roll(node.clock_ms())
        self.clean_a_little()
        self.clean()
        self.compare("after all cleanings")
        for node in self.hosting.values():
            self.require_clean(node.log)

    def require_promised(self, node_id: int, why: str) -> None:
        super().require_promised(node_id, why)
        self.require_deleted(node_id)

    def require_deleted(self, node_id: int) -> None:
        """No record of a key is left that a promised tombstone has deleted. An unclean election may bring one back."""
        if self.history:
            return
        found = content_of(self.nodes[node_id].log)
        newest = self.newest(found)
        for offset, value in self.promised.items():
            if offset < self.deleted_to or value in self.transactional:
                continue
            if not self.is_keyed(value) or not self.is_tombstone(value):
                continue
            self.uses["deleted"] += 1
            if newest.get(self.key_of(value), offset) < offset:
                raise Broken(
                    f"DeletedKeysStayDeleted: node {node_id} has a record of {self.key_of(value)!r} at "
                    f"{newest[self.key_of(value)]}, which a tombstone at {offset} has deleted"
                )

    def require_clean(self, log: PartitionLog) -> None:
        """Below where the cleaner begins next no key is there twice."""
        values = [value for offset, value in content_of(log).items() if offset < log.cleaned_offset]
        keys = [self.key_of(value) for value in values if self.is_keyed(value)]
        if len(keys) != len(set(keys)):
            raise Broken(f"TheCleanPartIsClean: {keys} below {log.cleaned_offset}")
