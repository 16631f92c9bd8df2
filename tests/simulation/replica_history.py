"""One seeded history of the replicas of a partition: elections, also unclean ones, deletions, restarts, a bad network.

The logs, the fetches and the ISR are the broker's own; this history is the controller. Each record has a value of its
own. What a leader acknowledges, and what the log of an uncleanly elected leader holds, is promised: each replica that
joins the ISR or is elected from it has it, except what was deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulation.storage_invariants import Broken
from tests.unit.replication.replicas import ReplicaNode, Replicas, Sent
from tidelog.protocol.batches.records import iter_records
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.reader import ColdRead

STEPS = 60
TURNS = (0, 2, 5, 10, 30, 100)
"""Of the loop, after which the next step comes: before the answers to what is under way, or behind them."""
LAG_MS = 1000
ROUNDS_MAX = 40
"""So many rounds after the last step bring each replica into the ISR."""


class Complaints(logging.Handler):
    """The messages of level ERROR: no history gives reason for one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def content_of(log: PartitionLog) -> dict[int, bytes]:
    """Offset -> value, from the log start to the log end."""
    found: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            result = log.read(offset, 1 << 20, log.log_end_offset)
        except ColdRead as cold:
            cold.warm()
            continue
        for record in iter_records(b"".join(map(bytes, result.regions))):
            if record.offset >= offset:
                found[record.offset] = record.value or b""
        offset = result.next_offset
    return found


class ReplicaHistory:
    """`weights`: how often each action is drawn. `uses`: how often something happened. `steps`: for a report."""

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, *, count: int = 3) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.steps: list[str] = []
        self.uses: Counter[str] = Counter()
        self.min_isr = rng.choice((1, 2, 2)) if count > 2 else 1
        """With more than one there is an ELR (KIP-966)."""
        self.cluster = Replicas(
            count,
            seed=seed,
            min_insync_replicas=str(self.min_isr),
            replica_lag_time_max_ms=str(LAG_MS),
            log_flush_interval_messages=rng.choice(("1", "4", str(2**63 - 1))),
            log_segment_delete_delay_ms=rng.choice(("0", "1000")),
        )
        self.cluster.configure(internal_segment_bytes=rng.choice(("300", "1000", "100000")))
        self.cluster.loop.settles_in = lambda: rng.choice(TURNS)
        self.is_lost = False
        """Whether the only member of the ISR has lost power: it lacks records, and the next election is unclean."""
        self.endings: dict[int, str] = {}
        self.serial = self.history = 0
        self.sent: list[tuple[int, list[bytes], Sent]] = []
        """Not acknowledged yet: (the history of its leader, the values, the request)."""
        self.promised: dict[int, bytes] = {}
        self.deleted: set[bytes] = set()
        self.deleted_to = 0
        """The offset below which a leader has deleted all: kills may bring records back there, each replica its own."""
        drawn = {
            self.produce: 14, self.run_on: 16, self.delete: 13, self.agree: 11, self.end: 13, self.start: 12,
            self.elect_uncleanly: 8, self.move_lead: 1, self.tell_all: 7, self.shrink: 2, self.cut: 1, self.heal: 3,
            self.checkpoint: 1, self.maintain: 1,
        }  # fmt: skip
        self.actions = {action: (weights or {}).get(action.__name__, weight) for action, weight in drawn.items()}

    def run(self) -> None:
        """The whole history. Raises Broken when an invariant does not hold."""
        complaints, logger = Complaints(), logging.getLogger("tidelog")
        logger.addHandler(complaints)
        try:
            for action in self.rng.choices(list(self.actions), list(self.actions.values()), k=STEPS):
                self.do(action)
            self.cluster.loop.settles_in = lambda: 10_000
            self.finish()
            if complaints.messages:
                raise Broken(f"NoComplaints: {complaints.messages[:3]}")
        except Exception as error:
            error.add_note(f"seed {self.seed}, after: {'; '.join(self.steps)}")
            raise
        finally:
            logger.removeHandler(complaints)

    def do(self, action: Any) -> None:
        self.steps.append(action.__name__)
        action()
        self.cluster.loop.settle()
        self.note_answers()

    def finish(self) -> None:
        """All are up and can reach each other: each is in the ISR again, and all have the same records."""
        for _ in range(ROUNDS_MAX):
            self.heal()
            for node_id in self.cluster.disks:
                if node_id not in self.nodes:
                    self.start_node(node_id)
            if self.leader is None and not self.elect_from_isr():
                self.elect_uncleanly()
            self.tell_all()
            self.cluster.loop.run_for(2 * LAG_MS)
            self.agree()
            self.note_answers()
            marks = set(self.cluster.marks().values())
            if len(self.cluster.placed.isr) == len(self.nodes) and len(marks) == 1 and len(set(*marks)) == 1:
                break
        else:
            logs = {node_id: self.describe(node_id) for node_id in self.nodes}
            raise Broken(f"EveryReplicaReturns: the ISR is {self.cluster.placed.isr} of {logs}")
        contents = {node_id: content_of(node.log) for node_id, node in self.nodes.items()}
        start = max(node.log.log_start_offset for node in self.nodes.values())
        # A killed replica may have deleted records back, and another may have those of an earlier history there.
        gone = {offset for each in contents.values() for offset, value in each.items() if value in self.deleted}
        shared = [
            {offset: value for offset, value in each.items() if offset >= start and offset not in gone}
            for each in contents.values()
        ]
        if any(each != shared[0] for each in shared):
            raise Broken(f"ReplicasAgree: {contents}")
        for node_id in self.nodes:
            self.require_promised(node_id, "at the end")

    # ---------------------------------------------------------------------------------------------------- the records

    @property
    def nodes(self) -> dict[int, ReplicaNode]:
        return self.cluster.nodes

    @property
    def leader(self) -> ReplicaNode | None:
        """The node that leads by the metadata, if it knows."""
        node = self.nodes.get(self.cluster.placed.leader)
        return node if node is not None and node.partition.leads else None

    def leaders(self) -> list[ReplicaNode]:
        """Also those that have not heard of a later one."""
        return [node for node in self.nodes.values() if node.partition.leads]

    def describe(self, node_id: int) -> str:
        log = self.nodes[node_id].log
        return f"{log.log_start_offset}..{log.log_end_offset} {list(log.leader_epochs)}"

    def produce(self) -> None:
        for node in self.leaders():
            for _ in range(self.rng.randint(1, 3)):
                values = []
                for _ in range(self.rng.choice((1, 1, 2, 4))):
                    self.serial += 1
                    values.append(b"%d" % self.serial)
                is_of_this = node.partition.leader_epoch >= self.first_epoch
                self.sent.append((self.history if is_of_this else -1, values, node.produce(*values, timeout_ms=60_000)))

    first_epoch = 0
    """The first leader epoch since the last unclean election."""

    def note_answers(self) -> None:
        waiting, self.sent = self.sent, []
        for history, values, sent in waiting:
            if history != self.history:
                continue  # of a leader before an unclean election
            if sent.frame is None:
                self.sent.append((history, values, sent))
            elif sent.code == 0:
                first = sent.response.responses[0].partition_responses[0].base_offset
                self.promised.update({first + number: value for number, value in enumerate(values)})
                self.uses["acknowledged"] += len(values)

    def delete(self) -> None:
        node = self.leader
        if node is None:
            return
        log = node.log
        start, high_watermark = log.log_start_offset, log.high_watermark
        before = content_of(log)
        to = high_watermark if self.rng.random() < 0.75 else self.rng.randint(start, max(start, high_watermark))
        if to > high_watermark:
            return
        node.partition.delete_records_as_leader(to)
        self.steps.append(f"to {to}")
        self.deleted.update(value for offset, value in before.items() if offset < log.log_start_offset)
        self.deleted_to = max(self.deleted_to, log.log_start_offset)

    def require_promised(self, node_id: int, why: str) -> None:
        log = self.nodes[node_id].log
        found = content_of(log)
        for offset, value in self.promised.items():
            if value not in self.deleted and found.get(offset) != value:
                what = f"{value!r} at {offset}, not {found.get(offset)!r}"
                raise Broken(f"PromisedRecordsArePresent: node {node_id} {why}: {what}; {self.describe(node_id)}")
        last = max(self.promised, default=-1)
        if log.log_end_offset <= last:
            raise Broken(
                f"PromisedRecordsArePresent: node {node_id} {why} ends before {last}: {self.describe(node_id)}"
            )

    # -------------------------------------------------------------------------------------------------- the controller

    def elect_from_isr(self) -> bool:
        candidates = self.candidates()
        if not candidates:
            return False
        chosen = self.rng.choice(candidates)
        self.require_promised(chosen, "is elected")
        if self.cluster.placed.isr:
            self.elect(chosen, self.cluster.placed.isr)
        else:
            self.uses["elected from the ELR"] += 1
            elr = tuple(each for each in self.cluster.placed.elr if each != chosen)
            self.cluster.placed = replace(self.cluster.placed, elr=elr)
            self.elect(chosen, (chosen,))
        return True

    def candidates(self) -> list[int]:
        placed = self.cluster.placed
        return [] if self.is_lost else [each for each in placed.isr or placed.elr if each in self.nodes]

    def name_elr(self, isr: tuple[int, ...], lost: tuple[int, ...] = ()) -> None:
        """Those that leave an ISR below the minimum may still be elected, unless they have lost power."""
        placed = self.cluster.placed
        elr = {*placed.elr, *placed.isr}.difference(isr, lost) if len(isr) < self.min_isr else ()
        self.cluster.placed = replace(placed, elr=tuple(sorted(elr)))

    def elect_uncleanly(self) -> None:
        """Choose one that is outside the ISR while no member of the ISR is up."""
        if self.candidates() or not self.nodes or self.leader is not None:
            return
        chosen = self.rng.choice(sorted(self.nodes))
        self.uses["unclean"] += 1
        self.history += 1
        self.is_lost = False
        self.first_epoch = self.cluster.placed.leader_epoch + 1
        self.cluster.placed = replace(self.cluster.placed, elr=())
        self.elect(chosen, (chosen,), told=0.3)
        log = self.nodes[chosen].log
        self.promised = {offset: value for offset, value in content_of(log).items() if offset >= self.deleted_to}
        self.deleted_to = min(self.deleted_to, log.log_end_offset)
        for _ in range(self.rng.choice((0, 1, 3))):
            self.produce()

    def elect(self, chosen: int, isr: tuple[int, ...], told: float = 0.7) -> None:
        """`told`: the share of the others that learn of it at once."""
        informed = [each for each in sorted(self.nodes) if each == chosen or self.rng.random() < told]
        self.steps.append(f"elect {chosen} of {isr}, tell {informed}: {self.describe(chosen)}")
        self.cluster.elect(chosen, isr, tell=informed)

    def move_lead(self) -> None:
        if self.cluster.placed.leader in self.nodes:
            self.elect_from_isr()

    def tell_all(self) -> None:
        self.cluster.tell()

    def agree(self) -> None:
        """Take the leader's proposal, if it is about the partition as it is."""
        node = self.leader
        if node is None:
            return
        placed, proposals = self.cluster.placed, node.proposals
        while proposals and proposals[-1][1] is not node.partition.in_sync.pending:
            proposals.pop()
        if not proposals:
            return
        partition, proposal = proposals[-1]
        is_known = (proposal.leader_epoch, proposal.partition_epoch) == (placed.leader_epoch, placed.partition_epoch)
        is_alive = proposal.adds is None or proposal.adds in self.nodes
        if not (is_known and is_alive and all(self.is_epoch(*member) for member in proposal.isr)):
            proposals.clear()
            partition.on_proposal_rejected(proposal)
            return
        self.name_elr(tuple(member for member, _ in proposal.isr))
        self.cluster.agree(node.id)
        self.steps.append(f"the ISR is {self.cluster.placed.isr}")
        if proposal.adds is not None:
            self.uses["joined"] += 1
            self.note_answers()
            self.require_promised(proposal.adds, "joins")

    def is_epoch(self, node_id: int, broker_epoch: int) -> bool:
        return broker_epoch in (-1, self.cluster.broker_epochs[node_id])

    def shrink(self) -> None:
        self.cluster.loop.run_for(LAG_MS * 1.5)
        if self.leader is not None:
            self.leader.partition.check_isr()
            self.agree()

    # ------------------------------------------------------------------------------------------------------- the nodes

    def run_on(self) -> None:
        self.cluster.loop.run_for(self.rng.choice((1, 30, 600, 600)))

    def checkpoint(self) -> None:
        if self.nodes:
            self.nodes[self.rng.choice(sorted(self.nodes))].checkpoint()

    def maintain(self) -> None:
        for node in self.nodes.values():
            node.directory.maintain(node.clock_ms())

    def cut(self) -> None:
        source, target = self.rng.sample(sorted(self.cluster.disks), 2)
        self.cluster.cut.add((source, target))

    def heal(self) -> None:
        self.cluster.heal()

    def end(self) -> None:
        if not self.nodes:
            return
        members = [each for each in self.cluster.placed.isr if each in self.nodes]
        node_id = self.rng.choice(members if members and self.rng.random() < 0.6 else sorted(self.nodes))
        how = self.rng.choice(("stopped", "killed", "killed", "lost power"))
        self.steps.append(f"{node_id} {how}: {self.describe(node_id)}")
        self.note_answers()
        self.endings[node_id] = how
        log = self.nodes[node_id].log
        while log.durability.is_running and self.cluster.loop.turn():
            pass  # a flush that is under way would outlive its process
        self.cluster.stop(node_id, power=how == "lost power", closed=how == "stopped")
        placed = self.cluster.placed
        self.cluster.fenced.add(node_id)
        self.cluster.broker_epochs[node_id] += 1
        isr = tuple(each for each in placed.isr if each != node_id)
        is_last = how == "lost power" and placed.isr in ((node_id,), ()) and self.min_isr < 2
        if is_last:
            self.is_lost = True
        elif how == "lost power" or self.min_isr > 1 or any(each in self.nodes for each in isr):
            self.name_elr(isr, (node_id,) if how == "lost power" else ())
            self.cluster.alter(isr=isr)
        if placed.leader == node_id:
            self.cluster.elect(-1, self.cluster.placed.isr, tell=())
            if not self.elect_from_isr() and self.rng.random() < 0.4:
                self.elect_uncleanly()

    def start(self) -> None:
        ended = sorted(set(self.cluster.disks) - set(self.nodes))
        if ended:
            self.start_node(self.rng.choice(ended))

    def start_node(self, node_id: int) -> None:
        self.cluster.fenced.discard(node_id)
        self.cluster.alter()
        node = self.cluster.start(node_id, killed=self.endings[node_id] == "killed")
        self.steps.append(f"start {node_id}: {self.describe(node_id)}")
        self.uses["starts"] += 1
        if self.endings[node_id] != "lost power" and node.directory.shortened_logs:
            raise Broken(f"NothingIsCut: the log of node {node_id}, which was {self.endings[node_id]}")
        if self.leader is None:
            self.elect_from_isr()
