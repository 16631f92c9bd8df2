"""What a damage case is: which replica, which file, when, who comes back first, who leads; by a seed or by name.

Everything is decided here, before anything runs, so that a seed replays the same choices.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.cluster.damage.injuries import Injury, choose

MOMENTS = ("running", "running", "stopped", "stopped", "killed", "killed", "all_stopped", "all_killed", "truncating")
PROMOTIONS = ("none", "preferred", "kill_leader")
NODES = (1, 2, 3)
PARTITIONS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """`victims` are nodes with the injury of each; all injuries meet the same partition.

    `moment`: while the victims run, after an orderly stop of the first victim or of all nodes, after SIGKILL of it or
    of all, or while the first victim leads with records that it is about to cut off. `victim_first`: of nodes that were
    all down, the first victim is started first, else last. `absent`: a node that is down from before the damage until
    the others are well again. `promotion`: how the first victim is made leader afterwards.
    """

    name: str
    seed: int
    partition: int
    victims: tuple[tuple[int, Injury], ...]
    moment: str
    victim_first: bool = False
    promotion: str = "none"
    absent: int | None = None
    compression: str = "none"
    separate: bool = False
    """Whether a node of its own is the controller, so that the first broker that comes back can lead alone."""

    @property
    def victim(self) -> int:
        return self.victims[0][0]

    def __str__(self) -> str:
        who = " and ".join(f"node {node} {injury}" for node, injury in self.victims) or "no damage"
        parts = [f"{who} of partition {self.partition}", self.moment]
        if self.moment.startswith("all"):
            parts.append("first" if self.victim_first else "last")
        if self.promotion != "none":
            parts.append(f"leads by {self.promotion}")
        if self.absent is not None:
            parts.append(f"node {self.absent} away")
        if self.separate:
            parts.append("controller apart")
        return ", ".join([*parts, self.compression])


def preferred_leader(partition: int) -> int:
    return NODES[partition % len(NODES)]


def replicas_of(partition: int) -> list[int]:
    """In the order of preference."""
    return [NODES[(partition + place) % len(NODES)] for place in range(len(NODES))]


def drawn(seed: int) -> Case:
    rng = random.Random(seed * 6151 + 7)
    victim = rng.choice(NODES)
    promotion = rng.choice(PROMOTIONS)
    # The victim leads at first, or is the one that follows when the first is gone.
    leads = promotion == "preferred" or (promotion == "none" and rng.random() < 0.5)
    partition = NODES.index(victim) if leads else (NODES.index(victim) - 1) % len(NODES)
    case = Case(
        f"seed {seed}",
        seed,
        partition,
        ((victim, choose(rng)),),
        rng.choice(MOMENTS),
        rng.random() < 0.5,
        promotion,
        compression=rng.choice(("none", "lz4", "zstd")),
        separate=rng.random() < 0.3,
    )
    if case.moment == "truncating":
        return replace(case, partition=NODES.index(victim), separate=False)
    return _with_a_second(case, rng) if rng.random() < 0.25 else case


def _with_a_second(case: Case, rng: random.Random) -> Case:
    """Two replicas damaged in different segments; sometimes the third is away, so that the two have only each other."""
    other = rng.choice([node for node in NODES if node != case.victim])
    early = replace(choose(rng, "sealed"), file_at=rng.random() * 0.3)
    late = replace(choose(rng, rng.choice(("sealed", "active"))), file_at=0.7 + rng.random() * 0.29)
    first, second = (early, late) if rng.random() < 0.5 else (late, early)
    absent = next(node for node in NODES if node not in (case.victim, other)) if rng.random() < 0.5 else None
    # With one node away the other two are all there is: neither can be killed for the other to lead.
    promotion = "none" if absent is not None and case.promotion == "kill_leader" else case.promotion
    victims = ((case.victim, first), (other, second))
    return replace(case, victims=victims, absent=absent, promotion=promotion)


def _injury(target: str, way: str, *, file_at: float = 0.3, place: float = 0.4) -> Injury:
    return Injury(target, way, file_at, place, 0.5)


# The seven rows that were seen; each must go well.
NAMED = {
    "a_flipped_bit_at_the_node_that_starts_first": Case(
        "", 1, 1, ((1, _injury("active", "payload_bit")),), "all_killed", victim_first=True, separate=True
    ),
    "a_damaged_header_in_a_sealed_segment_of_the_leader": Case(
        "", 2, 0, ((1, _injury("sealed", "base_offset")),), "stopped", promotion="preferred"
    ),
    "a_fetch_that_meets_damage_while_running": Case("", 3, 0, ((1, _injury("sealed", "length")),), "running"),
    "the_first_batch_of_an_active_segment": Case(
        "", 4, 0, ((1, _injury("active", "base_offset", place=0.0)),), "stopped"
    ),
    "a_follower_that_truncates_into_damage": Case(
        "", 5, 0, ((1, _injury("active", "last_offset_delta", place=0.0)),), "truncating"
    ),
    "damaged_payload_on_the_leader": Case("", 6, 0, ((1, _injury("sealed", "payload_bits")),), "running"),
    "a_zeroed_page_in_what_the_leader_serves": Case("", 7, 0, ((1, _injury("sealed", "zero_page")),), "running"),
}
NAMED = {name: replace(case, name=name) for name, case in NAMED.items()}
