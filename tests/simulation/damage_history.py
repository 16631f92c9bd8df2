"""A history of a cluster with a bad disk: what must hold when bytes change behind a node's back.

The rule: an acknowledged record is lost only when every in-sync copy of it is damaged; while one is whole, the record
can be read, no reader passes over a record, every partition can be written, and in the end all copies are whole. The
replicas with bad disks are not asked what they have (a look would find the damage for them): their files are read from
outside.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from tests.cluster.damage.injuries import METADATA, OFFSETS
from tests.cluster.damage.replicas import Batch, parse_batches
from tests.simulation.cluster import Cluster, Layout, SimulatedNode
from tests.simulation.cluster_clients import RecordingConsumer
from tests.simulation.cluster_faults import Fault
from tests.simulation.cluster_history import HEALED_S, TOPICS, ClusterHistory
from tests.simulation.cluster_invariants import (
    CommittedMetadataNeverChanges,
    CommittedRecordsNeverChange,
    HighWatermarkIsReplicated,
    HighWatermarkNeverGoesBack,
    Knowledge,
    picture,
)
from tests.simulation.damage_faults import DAMAGE_WEIGHTS, DamageFaults, files_of
from tests.simulation.world import Broken
from tidelog.broker.config import definitions as config_definitions
from tidelog.protocol.errors import ErrorCode

CONFIG = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "log.index.interval.bytes": "400",
    "log.cleaner.enable": "false",  # it would change what was committed
    "replica.high.watermark.checkpoint.interval.ms": "900",
}
SCRUBBING = {"log.scrub.bytes.per.second": str(8 << 20), "log.scrub.interval.ms": "2000"}
LAYOUTS = (((1, 2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2, 3)), ((4,), (1, 2, 3)))


class DamageKnowledge(Knowledge):
    """What a victim calls committed counts, though its files are not believed."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed: dict[tuple[str, int], int] = {}

    def committed_end(self, topic: str, index: int) -> int:
        return max(super().committed_end(topic, index), self.claimed.get((topic, index), 0))


class _OfWholeReplicas:
    """Nothing is asked of a victim."""

    victims: list[int]

    def on_step(self, node: SimulatedNode) -> None:
        if node.node_id not in self.victims:
            super().on_step(node)  # type: ignore[misc]

    def on_replica(self, node: SimulatedNode, replica: Any) -> None:
        if node.node_id not in self.victims:
            super().on_replica(node, replica)  # type: ignore[misc]
        else:
            self.of_victim(replica)

    def of_victim(self, replica: Any) -> None:
        pass


class WholeRecordsNeverChange(_OfWholeReplicas, CommittedRecordsNeverChange):
    def of_victim(self, replica: Any) -> None:
        knowledge = self.knowledge
        assert isinstance(knowledge, DamageKnowledge)
        if replica.leads:
            where = replica.topic, replica.index
            knowledge.claimed[where] = max(knowledge.claimed.get(where, 0), replica.high_watermark)


class WholeMetadataNeverChanges(_OfWholeReplicas, CommittedMetadataNeverChanges):
    pass


class WholeMarksNeverGoBack(_OfWholeReplicas, HighWatermarkNeverGoesBack):
    pass


class MarkIsOnWholeReplicas(HighWatermarkIsReplicated):
    victims: list[int]

    def _check(self, node: SimulatedNode, replica: Any, mark: int, member: int) -> None:
        if member not in self.victims:
            super()._check(node, replica, mark, member)


STAND_INS: dict[type, type] = {
    CommittedRecordsNeverChange: WholeRecordsNeverChange,
    CommittedMetadataNeverChanges: WholeMetadataNeverChanges,
    HighWatermarkNeverGoesBack: WholeMarksNeverGoBack,
    HighWatermarkIsReplicated: MarkIsOnWholeReplicas,
}


class PatientConsumer(RecordingConsumer):
    """A batch that is not whole is an error, and asked for again; going past it is not forgiven."""

    fatal = (ErrorCode.OFFSET_OUT_OF_RANGE,)


class DamageHistory(ClusterHistory):
    consumer = PatientConsumer

    def __init__(self, seed: int, faults: list[Fault] | None = None, **options: Any) -> None:
        rng = Random(seed * 15485863 + 5)
        controllers, brokers = rng.choice(LAYOUTS)
        self.victims = rng.sample(brokers, 2 if rng.random() < 0.25 else 1)
        options = {"weights": DAMAGE_WEIGHTS, "layout": _layout(rng, controllers, brokers), "syncs": True, **options}
        super().__init__(seed, faults, **options)
        self.knowledge = DamageKnowledge()
        self.administrator.knowledge = self.knowledge
        stepping = {type(each) for each in self.steppers}
        kinds = [type(each) for each in self.invariants]
        self.invariants = [STAND_INS.get(kind, kind)(self.cluster, self.knowledge) for kind in kinds]
        self.steppers[:] = [each for each, kind in zip(self.invariants, kinds) if kind in stepping]
        for each in self.invariants:
            if isinstance(each, (_OfWholeReplicas, MarkIsOnWholeReplicas)):
                each.victims = self.victims
        damage_rng = Random(seed * 104729 + 3)
        self.faults = DamageFaults(self.cluster, self.administrator, TOPICS, damage_rng, self.victims)

    def report(self) -> str:
        return f"{super().report()}\nbad disks: {self.victims}"

    def _at_rest(self) -> None:
        faults: list[str] = ["not looked at yet"]
        looked_at = -1.0

        def is_whole() -> bool:
            nonlocal looked_at
            if self.world.now - looked_at > 0.5:
                looked_at = self.world.now
                faults[:] = faults_of_copies(self.cluster)
            return not faults

        try:
            self._within(HEALED_S, "EveryCopyIsWhole", is_whole)
        except Broken as broken:
            raise Broken(f"EveryCopyIsWhole: {'; '.join(faults[:4])}") from broken
        # Readers are let in a moment after the bytes are whole.
        self.world.run_for(2.0)
        # The controller may move a leader at any time: what is on its way to the others is no disagreement.
        nodes = self.cluster.nodes.values()
        self._within(HEALED_S, "ImagesAgree", lambda: len({repr(picture(each.image)) for each in nodes}) == 1)


def _layout(rng: Random, controllers: tuple[int, ...], brokers: tuple[int, ...]) -> Layout:
    known = {key: value for key, value in SCRUBBING.items() if key in config_definitions.BROKER}
    own = {"log.roll.ms": str(rng.choice((300, 1000, 3000))), "log.flush.interval.messages": "1"}
    return Layout(controllers, brokers, {**CONFIG, **known, **own})


def faults_of_copies(cluster: Cluster) -> list[str]:
    """What is wrong with the batches of any replica, and where replicas differ; partitions and metadata alike."""
    wrong: list[str] = []
    copies: dict[str, dict[int, list[Batch]]] = {}
    for node in cluster.nodes.values():
        files = files_of(node.host.disk)
        for path in sorted(files):
            directory, _, name = path.rpartition("/")
            if not name.endswith(".log") or not directory or directory.endswith(("-delete", "-stray", "-future")):
                continue
            found = parse_batches(bytes(files[path].data), f"n{node.node_id} {path}", wrong)
            copies.setdefault(directory, {}).setdefault(node.node_id, []).extend(found)
    for directory, by_node in copies.items():
        if directory.startswith(OFFSETS):
            continue  # compaction leaves gaps, each node's its own
        for node_id, batches in by_node.items():
            for before, after in pairwise(batches):
                if after.base_offset != before.next_offset:
                    wrong.append(f"n{node_id} {directory}: {before.next_offset - 1} is followed by {after.base_offset}")
        wrong += _differences(directory, by_node)
    return wrong


def _differences(directory: str, by_node: dict[int, list[Batch]]) -> list[str]:
    start = max((batches[0].base_offset for batches in by_node.values() if batches), default=0)
    ends = {node_id: batches[-1].next_offset if batches else 0 for node_id, batches in by_node.items()}
    end = min(ends.values())
    if directory != METADATA and len(set(ends.values())) > 1:
        return [f"{directory} ends at {ends}"]
    contents = {
        node_id: [batch[:4] for batch in batches if batch.base_offset >= start and batch.next_offset <= end]
        for node_id, batches in by_node.items()
    }
    (one, expected), *others = contents.items()
    return [f"{directory} differs between n{one} and n{node_id}" for node_id, found in others if found != expected]
