"""What must hold of a cluster at every moment and at the end: one named class per promise.

`on_replica` is called when a replica of the node that has just run has another role, epoch or high watermark, `on_step`
for the node as a whole; `at_end` when all faults are over and the cluster has come to rest. Each raises `Broken` with
its own name first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.committed import CommittedLog, batches
from tests.simulation.world import Broken
from tidelog.protocol.batches.records import iter_records

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster, SimulatedNode

RECENTLY_S = 3.0


class Invariant:
    def __init__(self, cluster: Cluster, knowledge: Knowledge) -> None:
        self.cluster = cluster
        self.knowledge = knowledge

    def on_step(self, node: SimulatedNode) -> None:
        """`node` has just run, and its part in the quorum has changed."""

    def on_replica(self, node: SimulatedNode, replica: Any) -> None:
        """Something has changed there."""

    def at_end(self) -> None:
        """Nothing is broken any more and nobody sends."""

    def broken(self, message: str) -> Broken:
        return Broken(f"{type(self).__name__}: {message}")


class Knowledge:
    """What the simulation knows and no node does."""

    def __init__(self) -> None:
        self.committed: dict[tuple[bytes, int], CommittedLog] = {}
        self.metadata = CommittedLog("metadata")
        self.acknowledged: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        """(topic, partition) -> (offset, value) in the order of acknowledgement, of acks=all."""
        self.sent: dict[tuple[str, int], dict[bytes, None]] = {}
        """Values handed to a producer that promises to write each at most once, in this order for each producer."""
        self.consumed: dict[tuple[str, int], dict[int, bytes]] = {}
        self.topic_ids: dict[str, bytes] = {}

    def committed_end(self, topic: str, index: int) -> int:
        found = self.committed.get((self.topic_ids.get(topic, b""), index))
        return 0 if found is None else found.end


class OneLeaderPerEpoch(Invariant):
    """No two nodes lead one partition, or the metadata quorum, in the same epoch."""

    def __init__(self, cluster: Cluster, knowledge: Knowledge) -> None:
        super().__init__(cluster, knowledge)
        self.leaders: dict[Any, int] = {}

    def on_step(self, node: SimulatedNode) -> None:
        raft = node.raft
        if raft is not None and raft.is_leader and node.seen.get("led") != raft.epoch:
            node.seen["led"] = raft.epoch
            self._claim("the quorum", raft.epoch, node)

    def on_replica(self, node: SimulatedNode, replica: Any) -> None:
        if replica.leads:
            self._claim((replica.topic_id, replica.index, replica.topic), replica.leader_epoch, node)

    def _claim(self, what: Any, epoch: int, node: SimulatedNode) -> None:
        before = self.leaders.setdefault((what, epoch), node.node_id)
        if before != node.node_id:
            raise self.broken(f"{what} has leaders {before} and {node.node_id} in epoch {epoch}")


class HighWatermarkNeverGoesBack(Invariant):
    """Not while a process lives, whatever role its replica takes."""

    def on_replica(self, node: SimulatedNode, replica: Any) -> None:
        key = ("mark", replica)
        mark, before = replica.high_watermark, node.seen.get(key, 0)
        if mark < before:
            raise self.broken(f"{node} {replica!r} from {before} to {mark}")
        node.seen[key] = mark


class CommittedRecordsNeverChange(Invariant):
    """Below its high watermark every replica has what every other replica ever had there."""

    def on_replica(self, node: SimulatedNode, replica: Any) -> None:
        key = ("agreed", replica)
        mark, before = replica.high_watermark, node.seen.get(key, 0)
        if mark <= before:
            return
        where = replica.topic_id, replica.index
        committed = self.knowledge.committed.get(where)
        if committed is None:
            committed = self.knowledge.committed[where] = CommittedLog(f"{replica.topic}-{replica.index}")
            self.knowledge.topic_ids[replica.topic] = replica.topic_id
        committed.observe(replica.log, before, mark, f"{node} {replica!r}", type(self).__name__)
        node.seen[key] = mark


class CommittedMetadataNeverChanges(Invariant):
    """The same for the metadata log and its quorum."""

    def on_step(self, node: SimulatedNode) -> None:
        raft = node.raft
        mark, before = -1 if raft is None else raft.high_watermark, node.seen.get("metadata", 0)
        if mark < 0 or mark == before or raft.raft.lacks_records:  # a damaged log is cut, and fetched again
            return
        if mark < before:
            raise self.broken(f"{node} takes the high watermark back from {before} to {mark}")
        self.knowledge.metadata.observe(node.metadata_log, before, mark, str(node), type(self).__name__)
        node.seen["metadata"] = mark


class HighWatermarkIsReplicated(Invariant):
    """What a leader calls committed is in the logs of all who are in sync with it."""

    def on_replica(self, node: SimulatedNode, replica: Any) -> None:
        key = ("replicated", replica)
        mark = replica.high_watermark
        if replica.leads and mark > node.seen.get(key, 0):
            node.seen[key] = mark
            for member in replica.in_sync.isr:
                self._check(node, replica, mark, member)

    def _check(self, node: SimulatedNode, replica: Any, mark: int, member: int) -> None:
        other = self.cluster.nodes[member]
        if not other.ready or other.started_at > self.cluster.world.now - RECENTLY_S:
            return  # it may have lost what it had, and its leader does not know yet
        theirs = other.replica(replica.topic_id, replica.index)
        if theirs is None or theirs.offline or theirs.leader_epoch > replica.leader_epoch:
            return
        if theirs.log.log_end_offset < mark:
            raise self.broken(
                f"{node} {replica!r} commits up to {mark}, "
                f"{other} in its ISR {replica.in_sync.isr} has {theirs.log.log_end_offset}"
            )


class ImagesAgree(Invariant):
    """At rest every node has the same picture of the cluster."""

    def at_end(self) -> None:
        nodes = list(self.cluster.nodes.values())
        first = picture(nodes[0].image)
        for node in nodes[1:]:
            other = picture(node.image)
            if other != first:
                raise self.broken(f"{nodes[0]} has {first}, {node} has {other}")


def check_step(node: SimulatedNode, invariants: Sequence[Invariant]) -> None:
    """Check a node after it has run. Only a change of the quorum's or of a replica's state gives work."""
    seen, metadata, broker = node.seen, getattr(node.node, "_metadata", None), getattr(node.node, "_broker", None)
    node.host.disk.is_watched = True
    if metadata is not None and metadata.raft is not None:
        raft = metadata.raft
        in_quorum = raft.is_leader, raft.epoch, raft.high_watermark, raft.raft.lacks_records
        if seen.get("quorum") != in_quorum:
            seen["quorum"] = in_quorum
            for invariant in invariants:
                invariant.on_step(node)
    if broker is not None and broker.partitions is not None:
        for replica in broker.partitions.hosted():
            state = replica.leads, replica.leader_epoch, replica.log.high_watermark
            if seen.get(replica) != state:
                seen[replica] = state
                for invariant in invariants:
                    invariant.on_replica(node, replica)
    node.host.disk.is_watched = False


def picture(image: Any) -> Any:
    return [
        (topic.name, topic.topic_id.hex(), sorted((index, repr(placed)) for index, placed in topic.partitions.items()))
        for topic in sorted(image.topics_by_name.values(), key=lambda topic: str(topic.name))
    ]


class ReplicasAreEqual(Invariant):
    """At rest all replicas of a partition hold the same batches, and what was committed is among them."""

    def at_end(self) -> None:
        for (topic_id, index), committed in self.knowledge.committed.items():
            logs: list[tuple[Any, Any]] = []
            for node in self.cluster.nodes.values():
                replica = node.replica(topic_id, index)
                if replica is not None:
                    found = batches(replica.log, 0, replica.log.log_end_offset)
                    logs.append((node, found))
            if not logs:
                continue
            for node, found in logs[1:]:
                if found != logs[0][1]:
                    raise self.broken(f"{committed.name}: {logs[0][0]} {logs[0][1][-3:]}, {node} {found[-3:]}")
            held = {batch.base_offset: batch for batch in logs[0][1]}
            start = min(held, default=0)
            for base_offset, batch in committed.by_base_offset.items():
                if base_offset >= start and held.get(base_offset) != batch:
                    raise self.broken(f"{committed.name}: committed {batch} is {held.get(base_offset)}")


class AcknowledgedRecordsAreThere(Invariant):
    """Every record acknowledged with acks=all is in the log, at the offset that was told."""

    def at_end(self) -> None:
        for (topic, index), promised in self.knowledge.acknowledged.items():
            there = self.contents(topic, index)
            for offset, value in promised:
                if there.get(offset) != value:
                    raise self.broken(f"{topic}-{index}: {value!r} at {offset}, there is {there.get(offset)!r}")

    def contents(self, topic: str, index: int) -> dict[int, bytes]:
        leader = self.cluster.leader_of(topic, index)
        return {} if leader is None else contents(leader.replica(topic, index).log)


class NoDuplicates(AcknowledgedRecordsAreThere):
    """A record of an idempotent producer is there at most once, and each producer's are in the order it sent them."""

    def at_end(self) -> None:
        for (topic, index), sent in self.knowledge.sent.items():
            there = self.contents(topic, index)
            last: dict[bytes, int] = {}
            order = {value: number for number, value in enumerate(sent)}
            for offset in sorted(there):
                value = there[offset]
                number = order.get(value)
                if number is None:
                    continue
                producer = value.partition(b"-")[0]
                if number <= last.get(producer, -1):
                    around = {each: there[each] for each in sorted(there) if abs(each - offset) < 8}
                    raise self.broken(f"{topic}-{index}: {value!r} at {offset} again, or behind a later one: {around}")
                last[producer] = number


class ConsumersReadWhatStays(AcknowledgedRecordsAreThere):
    """What any consumer was given is in the log at that offset for ever."""

    def at_end(self) -> None:
        for (topic, index), consumed in self.knowledge.consumed.items():
            there = self.contents(topic, index)
            for offset, value in consumed.items():
                if there.get(offset) != value:
                    raise self.broken(f"{topic}-{index}: read {value!r} at {offset}, there is {there.get(offset)!r}")


def contents(log: Any) -> dict[int, bytes]:
    """Offset -> value of every data record."""
    found: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        result = log.read(offset, 1 << 20, log.log_end_offset)
        if not result.size_bytes:
            raise Broken(f"LogsCanBeRead: nothing at {offset} of {log!r}")
        for region in result.regions:
            for record in iter_records(bytes(region)):
                found[record.offset] = record.value or b""
        offset = result.next_offset
    return found


STEP_INVARIANTS = (
    OneLeaderPerEpoch,
    HighWatermarkNeverGoesBack,
    CommittedRecordsNeverChange,
    CommittedMetadataNeverChanges,
    HighWatermarkIsReplicated,
)
END_INVARIANTS = (
    ImagesAgree,
    ReplicasAreEqual,
    AcknowledgedRecordsAreThere,
    NoDuplicates,
    ConsumersReadWhatStays,
)
