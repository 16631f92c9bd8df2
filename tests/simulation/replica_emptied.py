"""Histories in which all records are deleted while a replica is away, and it is elected uncleanly afterwards.

The others have empty logs then, with or without a leader epoch, that begin above the records that it promises.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.replica_history import LAG_MS, ReplicaHistory


class EmptiedReplicas(ReplicaHistory):
    def actions_drawn(self) -> dict[Callable[[], None], int]:
        return {**super().actions_drawn(), self.miss_a_deletion: 12}

    def miss_a_deletion(self) -> None:
        """Two are away: one comes back to an empty log and begins anew, the other is elected when the rest is down."""
        away, late, *_ = self.rng.sample(sorted(self.cluster.disks), 2)
        self.end_all([away, late])
        self.shrink()
        for _ in range(self.rng.choice((1, 2))):
            self.produce()
            self.run_for_long(self.rng.choice((30, LAG_MS)))
            self.note_answers()
        self.delete()
        if late not in self.nodes:
            self.start_node(late)
        self.run_for_long(self.rng.choice((30, LAG_MS)))
        self.end_all([each for each in sorted(self.nodes) if each != away])
        if away not in self.nodes:
            self.start_node(away)
        self.elect_uncleanly()
        for _ in range(self.rng.choice((0, 2, 4))):
            self.produce()
        self.uses["missed a deletion"] += 1

    def end_all(self, node_ids: list[int]) -> None:
        for node_id in node_ids:
            if node_id in self.nodes:
                self.let_flushes_end(self.nodes[node_id])
                self.end_node(node_id, self.rng.choice(("stopped", "killed", "killed", "lost power")))
