"""Histories of the replicas of a partition that move: between the log directories of a node, and between nodes.

The moves, the hosting and the logs are the broker's own. The controller is this history: it learns the directory of a
replica from reports, and ends a reassignment when the added replica is in the ISR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.replica_history import LAG_MS, ROUNDS_MAX
from tests.simulation.replica_transactions import TransactionsOfReplicas
from tests.simulation.storage_invariants import Broken
from tests.unit.replication.replicas import TOPIC_ID, ReplicaNode
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.uuids import UNASSIGNED_DIRECTORY

KEY = (TOPIC_ID, 0)
REPLICAS_MIN = 2


class PlacesOfReplicas(TransactionsOfReplicas):
    def options(self) -> dict[str, str]:
        self.accepted: list[tuple[ReplicaNode, bytes]] = []
        """Reports that the controller has accepted, and whose answers are under way."""
        return {**super().options(), "log_dirs": "/data,/other"}

    def actions_drawn(self) -> dict[Callable[[], None], int]:
        return {
            **super().actions_drawn(),
            self.order_move: 8, self.accept_reports: 8, self.answer_reports: 8, self.add_replica: 4,
            self.remove_replica: 4, self.strike: 4,
        }  # fmt: skip

    def finish(self) -> None:
        super().finish()
        for _ in range(ROUNDS_MAX):
            self.accept_reports(all_of_them=True)
            self.answer_reports(all_of_them=True)
            self.run_for_long(2 * LAG_MS)
            moving = [node.id for node in self.hosting.values() if node.moves is not None and node.moves._moves]
            if not moving and not self.accepted and self.is_at_rest():
                break
        else:
            raise Broken(f"EveryMoveEnds: on {moving}")
        self.compare("after all moves")
        for node in self.hosting.values():
            homes = [home for home in node.homes if home.logs]
            if len(homes) != 1 or homes[0].directory_id != self.cluster.placed.directory_of(node.id):
                raise Broken(f"OneDirectoryHasTheReplica: {[home.path for home in homes]} on node {node.id}")
            if any(home.futures for home in node.homes):
                raise Broken(f"NoCopyIsLeft: on node {node.id}")

    # -------------------------------------------------------------------------------------------- between directories

    def order_move(self) -> None:
        hosting = sorted(self.hosting)
        if not hosting:
            return
        node = self.nodes[self.rng.choice(hosting)]
        assert node.moves is not None
        try:
            node.moves.order("t", 0, self.rng.choice(node.homes).path)
        except KafkaError as error:
            self.steps.append(f"{node.id} does not move: {error}")
        if node.moves._moves:
            self.uses["moves"] += 1

    def accept_reports(self, *, all_of_them: bool = False) -> None:
        """The controller assigns the directories; each node may learn it before the answer, or after it."""
        for node in self.nodes.values():
            assert node.assignments is not None
            reported = node.assignments.reported.get(KEY)
            placed = self.cluster.placed
            if reported is None or node.id not in placed.replicas or (not all_of_them and self.rng.random() < 0.3):
                continue
            directories = [
                reported[0] if each == node.id else placed.directory_of(each) for each in placed.replicas
            ]  # fmt: skip
            self.accepted.append((node, reported[0]))
            if tuple(directories) != placed.directories:
                self.cluster.place(directories=tuple(directories))
                self.steps.append(f"{node.id} is in {node.path_of(reported[0])}")
        if all_of_them or self.rng.random() < 0.6:
            self.tell_all()

    def answer_reports(self, *, all_of_them: bool = False) -> None:
        accepted, self.accepted = self.accepted, []
        for node, directory_id in accepted:
            assert node.assignments is not None
            if self.nodes.get(node.id) is not node:
                continue
            if not all_of_them and self.rng.random() < 0.3:
                self.accepted.append((node, directory_id))
                continue
            if node.assignments.reported.get(KEY, (b"", None))[0] == directory_id:
                _, on_accepted = node.assignments.reported.pop(KEY)
                if on_accepted is not None:
                    self.uses["moves told"] += 1
                    on_accepted()

    def let_flushes_end(self, node: ReplicaNode) -> None:
        assert node.moves is not None
        node.moves._closed = True
        node.end_moves()
        super().let_flushes_end(node)

    def strike(self) -> None:
        """A process ends at one of its next operations on the disk: also in a start, or while it closes its logs."""
        self.rng.choice(list(self.cluster.disks.values())).fail_after(self.rng.choice((1, 5, 20, 60)))

    # -------------------------------------------------------------------------------------------------- between nodes

    def add_replica(self) -> None:
        placed = self.cluster.placed
        others = sorted(set(self.cluster.disks) - set(placed.replicas))
        if others:
            added = self.rng.choice(others)
            directories = [placed.directory_of(each) for each in placed.replicas]
            self.steps.append(f"{added} becomes a replica")
            self.cluster.place(
                replicas=(*placed.replicas, added), directories=(*directories, UNASSIGNED_DIRECTORY),
                adding_replicas=(added,),
            )  # fmt: skip
            self.tell_some()
            self.uses["added"] += 1

    def end_reassignment(self, isr: tuple[int, ...]) -> None:
        placed = self.cluster.placed
        if set(placed.adding_replicas) <= set(isr):
            self.cluster.placed = replace(placed, adding_replicas=())

    def remove_replica(self) -> None:
        """One that others in the ISR can do without."""
        placed = self.cluster.placed
        if len(placed.replicas) <= REPLICAS_MIN or not set(placed.adding_replicas).issubset(placed.isr):
            return
        removed = self.rng.choice(placed.replicas)
        isr = tuple(each for each in placed.isr if each != removed)
        if not isr or self.is_lost:
            return
        replicas = tuple(each for each in placed.replicas if each != removed)
        self.steps.append(f"{removed} is no replica any more")
        self.cluster.place(
            replicas=replicas, directories=tuple(placed.directory_of(each) for each in replicas), isr=isr,
            elr=tuple(each for each in placed.elr if each != removed), adding_replicas=(),
        )  # fmt: skip
        self.uses["removed"] += 1
        self.kept.pop(removed, None)
        if placed.leader == removed and not self.elect_from_isr():
            self.cluster.elect(-1, isr, tell=())
        self.tell_some()

    def tell_some(self) -> None:
        self.cluster.tell([each for each in sorted(self.nodes) if self.rng.random() < 0.7])
