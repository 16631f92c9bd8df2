"""One seeded history of the replicas of a partition: elections, also unclean ones, deletions, restarts, a bad network.

The logs, the fetches and the ISR are the broker's own; this history is the controller. Each record has a value of its
own. What a leader acknowledges, and what the log of an uncleanly elected leader holds, is promised: each replica that
joins the ISR or is elected from it has it, except what was deleted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from tests.simulation.simulated_disk import NEVER, PowerLoss
from tests.simulation.storage_invariants import Broken
from tests.unit.replication.replicas import ReplicaNode, Replicas, Sent
from tidelog.protocol.batches.record import Record
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import decode_batch
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.reader import ColdRead

STEPS = 60
TURNS = (0, 2, 5, 10, 30, 100)
"""Of the loop, after which the next step comes: before the answers to what is under way, or behind them."""
LAG_MS = 1000
STRUCK_TURNS_MAX = 10_000
ROUNDS_MAX = 40
"""So many rounds after the last step bring each replica into the ISR."""


class Complaints(logging.Handler):
    """The messages of level ERROR: no history gives reason for one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def value_of(record: Record) -> bytes:
    """A tombstone has its number in a header."""
    if record.value is None and record.headers:
        return record.headers[0][1] or b""
    return record.value or b""


def content_of(log: PartitionLog) -> dict[int, bytes]:
    """Offset -> `value_of` the record, from the log start to the log end; also of markers of transactions."""
    found: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            result = log.read(offset, 1 << 20, log.log_end_offset)
        except ColdRead as cold:
            cold.warm()
            continue
        data = b"".join(map(bytes, result.regions))
        for position, header in iter_headers(data):
            for record in decode_batch(data, position, header):
                if record.offset >= offset:
                    found[record.offset] = value_of(record)
        offset = result.next_offset
    return found


class ReplicaHistory:
    """`weights`: how often each action is drawn. `uses`: how often something happened. `steps`: for a report."""

    def __init__(self, seed: int, weights: Mapping[str, int] | None = None, *, count: int = 3) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.steps: list[str] = []
        self.complaints = Complaints()
        self.uses: Counter[str] = Counter()
        self.min_isr = rng.choice((1, 2, 2)) if count > 2 else 1
        """With more than one there is an ELR (KIP-966)."""
        self.cluster = Replicas(
            count,
            seed=seed,
            min_insync_replicas=str(self.min_isr),
            replica_lag_time_max_ms=str(LAG_MS),
            log_flush_interval_messages=(flush_messages := rng.choice(("1", "4", str(2**63 - 1)))),
            log_segment_delete_delay_ms=rng.choice(("0", "1000")),
            **self.options(),
        )
        self.cluster.record_of = self.record_of
        self.cluster.configure(**self.topic_configs())
        self.cluster.loop.settles_in = lambda: rng.choice(TURNS)
        self.is_synced = flush_messages == "1"
        """Whether records are on the device before they are acknowledged: no loss of power takes one."""
        self.is_lost = False
        """Whether the only member of the ISR has lost power: it lacks records, and the next election is unclean."""
        self.endings: dict[int, str] = {}
        """How each process ended that is down: stopped, killed, struck (killed at one of its writes), lost power."""
        self.kept: dict[int, dict[int, bytes]] = {}
        """What each process that is down has had on its device: it was in the ISR, where each record is synced."""
        self.serial = self.history = 0
        self.sent: list[tuple[int, list[bytes], Sent]] = []
        """Not acknowledged yet: (the history of its leader, the values, the request)."""
        self.promised: dict[int, bytes] = {}
        self.deleted: set[bytes] = set()
        self.deleted_to = 0
        """The offset below which a leader has deleted all: kills may bring records back there, each replica its own."""
        drawn = self.actions_drawn()
        self.actions = {action: (weights or {}).get(action.__name__, weight) for action, weight in drawn.items()}

    def options(self) -> dict[str, str]:
        """Of the brokers, besides those that are drawn here."""
        return {}

    def topic_configs(self) -> dict[str, str]:
        return {
            "internal_segment_bytes": self.rng.choice(("300", "1000", "100000")),
            "retention_bytes": self.rng.choice(("-1", "-1", "-1", "600")),
        }

    def record_of(self, number: int, now_ms: int, value: bytes) -> Record:
        """What a client sends: `number` in its batch."""
        return Record(number, now_ms, None, value)

    def may_lack(self, offset: int, value: bytes, found: Mapping[int, bytes]) -> bool:
        """Whether a log with these records need not have this one."""
        return value in self.deleted

    def agree_on(self, contents: Mapping[int, Mapping[int, bytes]]) -> bool:
        """Whether all copies have the same."""
        first, *others = contents.values()
        return all(each == first for each in others)

    def actions_drawn(self) -> dict[Callable[[], None], int]:
        """Action -> weight."""
        return {
            self.produce: 14, self.run_on: 16, self.delete: 13, self.agree: 11, self.end: 13, self.start: 12,
            self.elect_uncleanly: 8, self.move_lead: 1, self.tell_all: 7, self.shrink: 2, self.cut: 1, self.heal: 3,
            self.checkpoint: 1, self.maintain: 2,
        }  # fmt: skip

    def check(self, node_id: int, why: str) -> None:
        """What else must hold of a replica that is elected, joins the ISR, starts, or is whole at the end."""

    def run(self) -> None:
        """The whole history. Raises Broken when an invariant does not hold."""
        logger = logging.getLogger("tidelog")
        logger.addHandler(self.complaints)
        try:
            for action in self.rng.choices(list(self.actions), list(self.actions.values()), k=STEPS):
                self.do(action)
            for disk in self.cluster.disks.values():
                disk.fail_at = NEVER
            self.cluster.loop.settles_in = lambda: 10_000
            self.finish()
            if self.complaints.messages:
                raise Broken(f"NoComplaints: {self.complaints.messages[:3]}")
        except Exception as error:
            error.add_note(f"seed {self.seed}, after: {'; '.join(self.steps)}")
            raise
        finally:
            self.cluster.close()
            logger.removeHandler(self.complaints)

    def do(self, action: Any) -> None:
        self.steps.append(action.__name__)
        with suppress(PowerLoss):
            action()
        self.cluster.loop.settle()
        self.note_answers()
        self.bury()

    def finish(self) -> None:
        """All are up and can reach each other: each is in the ISR again, and all have the same records."""
        for _ in range(ROUNDS_MAX):
            self.heal()
            self.bury()
            for node_id in self.cluster.disks:
                if node_id not in self.nodes:
                    self.start_node(node_id)
            if self.leader is None and not self.elect_from_isr():
                self.elect_uncleanly()
            self.tell_all()
            self.run_for_long(2 * LAG_MS)
            self.agree()
            self.note_answers()
            if len(self.cluster.placed.isr) == len(self.cluster.placed.replicas) and self.is_at_rest():
                break
        else:
            logs = {node_id: self.describe(node_id) for node_id in self.nodes}
            raise Broken(f"EveryReplicaReturns: the ISR is {self.cluster.placed.isr} of {logs}")
        self.compare("at the end")

    def is_at_rest(self) -> bool:
        """Whether each replica has all, and knows that it is committed."""
        marks = {node.marks for node in self.hosting.values()}
        return len(marks) == 1 and len(set(*marks)) == 1

    def compare(self, why: str) -> None:
        """All replicas have what was promised, and the same."""
        contents = {node_id: content_of(node.log) for node_id, node in self.hosting.items()}
        start = max(node.log.log_start_offset for node in self.hosting.values())
        # A killed replica may have deleted records back, and another may have those of an earlier history there.
        gone = {offset for each in contents.values() for offset, value in each.items() if value in self.deleted}
        shared = {
            node_id: {offset: value for offset, value in each.items() if offset >= start and offset not in gone}
            for node_id, each in contents.items()
        }
        if not self.agree_on(shared):
            raise Broken(f"ReplicasAgree: {contents}")
        for node_id in self.hosting:
            self.require_promised(node_id, why)

    # ---------------------------------------------------------------------------------------------------- the records

    @property
    def nodes(self) -> dict[int, ReplicaNode]:
        return self.cluster.nodes

    @property
    def hosting(self) -> dict[int, ReplicaNode]:
        """The nodes that have a replica."""
        return {node_id: node for node_id, node in self.nodes.items() if node.hosts and not node.disk.is_off}

    @property
    def leader(self) -> ReplicaNode | None:
        """The node that leads by the metadata, if it knows."""
        node = self.hosting.get(self.cluster.placed.leader)
        return node if node is not None and node.partition.leads else None

    def leaders(self) -> list[ReplicaNode]:
        """Also those that have not heard of a later one."""
        return [node for node in self.hosting.values() if node.partition.leads]

    def describe(self, node_id: int) -> str:
        if node_id not in self.hosting:
            return "no replica"
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
                with suppress(PowerLoss):
                    sent = node.produce(*values, timeout_ms=60_000)
                    self.sent.append((self.history if is_of_this else -1, values, sent))

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
            if found.get(offset) != value and not self.may_lack(offset, value, found):
                what = f"{value!r} at {offset}, not {found.get(offset)!r}"
                raise Broken(f"PromisedRecordsArePresent: node {node_id} {why}: {what}; {self.describe(node_id)}")
        last = max(self.promised, default=-1)
        if log.log_end_offset <= last:
            raise Broken(
                f"PromisedRecordsArePresent: node {node_id} {why} ends before {last}: {self.describe(node_id)}"
            )
        self.check(node_id, why)

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
        return [] if self.is_lost else [each for each in placed.isr or placed.elr if each in self.hosting]

    def name_elr(self, isr: tuple[int, ...], lost: tuple[int, ...] = ()) -> None:
        """Those that leave an ISR below the minimum may still be elected, unless they have lost power."""
        placed = self.cluster.placed
        elr = {*placed.elr, *placed.isr}.difference(isr, lost) if len(isr) < self.min_isr else ()
        self.cluster.placed = replace(placed, elr=tuple(sorted(elr)))

    def elect_uncleanly(self) -> None:
        """Choose one that is outside the ISR while no member of the ISR is up."""
        hosting = sorted(set(self.hosting).intersection(self.cluster.placed.replicas))
        if self.candidates() or not hosting or self.leader is not None:
            return
        chosen = self.rng.choice(hosting)
        log = self.nodes[chosen].log
        content, end_offset = content_of(log), log.log_end_offset
        self.uses["unclean"] += 1
        self.history += 1
        self.is_lost = False
        self.first_epoch = self.cluster.placed.leader_epoch + 1
        self.cluster.placed = replace(self.cluster.placed, elr=())
        self.promised = {offset: value for offset, value in content.items() if offset >= self.deleted_to}
        self.deleted_to = min(self.deleted_to, end_offset)
        self.elect(chosen, (chosen,), told=0.3)
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
        is_alive = proposal.adds is None or proposal.adds in self.hosting
        if not (is_known and is_alive and all(self.is_epoch(*member) for member in proposal.isr)):
            proposals.clear()
            partition.on_proposal_rejected(proposal)
            return
        isr = tuple(member for member, _ in proposal.isr)
        self.name_elr(isr)
        self.end_reassignment(isr)
        self.cluster.agree(node.id)
        self.steps.append(f"the ISR is {self.cluster.placed.isr}")
        if proposal.adds is not None:
            self.uses["joined"] += 1
            self.note_answers()
            self.require_promised(proposal.adds, "joins")

    def end_reassignment(self, isr: tuple[int, ...]) -> None:
        """If these are in sync now, the controller ends one in the same decision."""

    def is_epoch(self, node_id: int, broker_epoch: int) -> bool:
        return broker_epoch in (-1, self.cluster.broker_epochs[node_id])

    def shrink(self) -> None:
        self.run_for_long(LAG_MS * 1.5)
        if self.leader is not None:
            self.leader.partition.check_isr()
            self.agree()

    # ------------------------------------------------------------------------------------------------------- the nodes

    def run_on(self) -> None:
        self.run_for_long(self.rng.choice((1, 30, 600, 600)))

    def checkpoint(self) -> None:
        if self.nodes:
            self.nodes[self.rng.choice(sorted(self.nodes))].checkpoint()

    def maintain(self) -> None:
        """With retention by size each replica deletes on its own."""
        for node in self.hosting.values():
            before = content_of(node.log)
            for home in node.homes:
                home.maintain(node.clock_ms())
            self.note_deleted(node, before)

    def run_for_long(self, duration_ms: float) -> None:
        """Retention may be due meanwhile."""
        before = {node: content_of(node.log) for node in self.hosting.values()}
        self.cluster.loop.run_for(duration_ms)
        for node, content in before.items():
            if node in self.hosting.values():
                self.note_deleted(node, content)

    def note_deleted(self, node: ReplicaNode, before: Mapping[int, bytes]) -> None:
        start = node.log.log_start_offset
        self.deleted.update(value for offset, value in before.items() if offset < start)
        self.deleted_to = max(self.deleted_to, start)

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
        self.let_flushes_end(self.nodes[node_id])
        if not self.nodes[node_id].disk.is_off:
            self.end_node(node_id, how)

    def end_node(self, node_id: int, how: str) -> None:
        self.steps.append(f"{node_id} {how}: {self.describe(node_id)}")
        self.note_answers()
        node = self.nodes[node_id]
        high_watermark = node.log.high_watermark if node.hosts else 0
        if self.is_synced and node.hosts and node_id in self.cluster.placed.isr:
            with node.disk.powered():
                content = content_of(node.log)
            self.kept[node_id] = {offset: value for offset, value in content.items() if offset < high_watermark}
        if not self.cluster.stop(node_id, power=how == "lost power", closed=how == "stopped"):
            how = "struck"
            self.steps.append("in its last writes")
        self.endings[node_id] = how
        self.cluster.fenced.add(node_id)
        self.leave(node_id, how, high_watermark)
        if self.cluster.placed.leader == node_id:
            self.cluster.elect(-1, self.cluster.placed.isr, tell=())
            if not self.elect_from_isr() and self.rng.random() < 0.4:
                self.elect_uncleanly()

    def leave(self, node_id: int, how: str, high_watermark: int) -> None:
        """The process has ended: what the controller makes of it."""
        self.cluster.broker_epochs[node_id] += 1
        placed = self.cluster.placed
        isr = tuple(each for each in placed.isr if each != node_id)
        is_last = how == "lost power" and placed.isr in ((node_id,), ()) and self.min_isr < 2
        if is_last and self.is_synced and placed.isr:
            self.promised = {offset: value for offset, value in self.promised.items() if offset < high_watermark}
        elif is_last:
            self.is_lost = True
        elif how == "lost power" or self.min_isr > 1 or any(each in self.nodes for each in isr):
            self.name_elr(isr, (node_id,) if how == "lost power" else ())
            self.cluster.alter(isr=isr)

    def disclaim(self, node_id: int) -> None:
        """The process may have lost records, and says so: it does not speak for the last one, and leaves the ISR."""
        self.complaints.messages = [each for each in self.complaints.messages if "acknowledged records" not in each]
        placed = self.cluster.placed
        if placed.isr != (node_id,) or self.min_isr > 1:
            isr = tuple(each for each in placed.isr if each != node_id)
            self.name_elr(isr, (node_id,))
            self.cluster.alter(isr=isr)

    def let_flushes_end(self, node: ReplicaNode) -> None:
        """One that is under way would outlive its process."""
        while node.hosts and node.log.durability.is_running and self.cluster.loop.turn():
            pass

    def end_start(self, node_id: int) -> None:
        """A start has ended at one of its writes."""
        how = self.rng.choice(("struck", "lost power"))
        self.steps.append(f"{node_id} {how} in its start")
        if node_id in self.nodes:
            self.let_its_work_end()
            self.cluster.stop(node_id, power=how == "lost power")
        elif how == "lost power":
            self.cluster.disks[node_id].lose_power()
        else:
            self.cluster.disks[node_id].end_process()
        self.cluster.fenced.add(node_id)
        if how == "lost power" and self.endings[node_id] != how:
            self.leave(node_id, how, 0)
        if self.endings[node_id] != "lost power":
            self.endings[node_id] = how

    def bury(self) -> None:
        """The processes whose disks were struck end."""
        for node_id, node in list(self.nodes.items()):
            if node.disk.is_off:
                self.uses["struck"] += 1
                self.let_its_work_end()
                self.end_node(node_id, self.rng.choice(("struck", "lost power")))

    def let_its_work_end(self) -> None:
        """What a struck process has under way meets its disk as it is, not as the next process has it."""
        for _ in range(STRUCK_TURNS_MAX):
            if not self.cluster.loop.turn():
                return
        raise AssertionError("it goes on and on")

    def start(self) -> None:
        ended = sorted(set(self.cluster.disks) - set(self.nodes))
        if ended:
            self.start_node(self.rng.choice(ended))

    def start_node(self, node_id: int) -> None:
        self.cluster.fenced.discard(node_id)
        self.cluster.alter()
        node = None
        with suppress(PowerLoss):
            node = self.cluster.start(node_id, killed=self.endings[node_id] in ("killed", "struck"))
        if node is None or node.disk.is_off:
            self.end_start(node_id)
            return
        self.steps.append(f"start {node_id}: {self.describe(node_id)}")
        self.uses["starts"] += 1
        kept = self.kept.pop(node_id, {})
        if node.hosts:  # before the loop goes on: another leader may have it begin anew
            found = content_of(node.log)
            lost = {
                at: value
                for at, value in kept.items()
                if found.get(at) != value and not self.may_lack(at, value, found)
            }
            if lost:
                raise Broken(f"SyncedRecordsAreKept: node {node_id} lacks {lost}: {self.describe(node_id)}")
        if any(home.shortened_logs for home in node.homes):
            if self.endings[node_id] in ("killed", "stopped"):
                raise Broken(f"NothingIsCut: the log of node {node_id}, which was {self.endings[node_id]}")
            self.disclaim(node_id)
        if node.hosts:
            self.check(node_id, "starts")
        if self.leader is None:
            self.elect_from_isr()
