"""When a leader whose log is damaged behind its high watermark asks for another leader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tidelog.broker.replicas.damaged_leaders import DEAD_REPLICA_WAIT_S, DamagedLeaders
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.controller.metadata.image import PartitionImage
from tidelog.replication.isr import InSyncReplicas
from tidelog.replication.partition import Partition, ReplicaPorts
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.segments.damage import DamagedRange

DAMAGE = DamagedRange(100, 200, 5, 6, "")
ENDS_AT_IT = b""
ENDS_BEFORE: Any = KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
HAS_IT = b"a batch"
HAS_IT_DAMAGED: Any = KafkaError(ErrorCode.CORRUPT_MESSAGE)
DOWN: Any = PeerUnreachable("nobody listens")


class Leader:
    """Broker 1, whose log ends at 9 and is damaged at 5; `answers` to a fetch from there of brokers 2 and 3."""

    def __init__(self, *answers: Any, isr: tuple[int, ...] = (1, 2, 3), elr: tuple[int, ...] = ()) -> None:
        self.answers = dict(zip((2, 3), answers))
        self.while_asked: Callable[[], object] = lambda: None
        self.proposals: list[Any] = []
        self.epochs = {1: 11, 2: 12, 3: 13}
        self.assigned = PartitionImage((1, 2, 3), isr, 1, leader_epoch=4, partition_epoch=7, elr=elr)
        ports = ReplicaPorts(
            broker_epoch=lambda: 11, propose=lambda partition, proposal: self.proposals.append(proposal)
        )
        log: Any = SimpleNamespace(log_end_offset=9, high_watermark=5)
        self.partition = Partition("t", 0, b"t" * 16, log, lambda partition: None, ports)
        self.partition.leads, self.partition.leader_epoch = True, 4
        self.partition.in_sync = InSyncReplicas(1, 30_000)
        self.partition.in_sync.assign((1, 2, 3), isr, 4, 7, 0, 0.0)
        repairs: Any = SimpleNamespace(
            assignment_of=lambda partition: self.assigned, others=lambda partition: [2, 3], fetch=self.fetch
        )
        self.dead: set[int] = set()
        self.now_s = 100.0
        self.leaders = DamagedLeaders(1, repairs, self.image, lambda: self.now_s)

    def image(self) -> Any:
        brokers = {each: SimpleNamespace(epoch=epoch, fenced=each in self.dead) for each, epoch in self.epochs.items()}
        return SimpleNamespace(brokers=brokers)

    async def fetch(self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool) -> bytes:
        assert (offset, up_to_log_end) == (5, True)
        answer = self.answers[source]
        self.while_asked()
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    async def resigns(self) -> bool:
        is_asked = self.leaders.may_resign(self.partition, DAMAGE) and await self.leaders.resign(self.partition, DAMAGE)
        assert is_asked == bool(self.proposals)
        return is_asked


async def test_it_resigns_where_no_replica_has_what_is_damaged() -> None:
    leader = Leader(ENDS_AT_IT, ENDS_AT_IT)
    assert await leader.resigns()
    [proposal] = leader.proposals
    assert [member for member, _ in proposal.isr] == [2, 3]
    assert (proposal.leader_epoch, proposal.partition_epoch, proposal.resigns) == (4, 7, True)


@pytest.mark.parametrize(
    ("isr", "elr", "answers"),
    [
        ((1, 2), (), (ENDS_AT_IT, ENDS_BEFORE)),
        ((1,), (3,), (ENDS_BEFORE, ENDS_AT_IT)),
    ],
)
async def test_a_replica_that_is_not_to_lead_may_end_anywhere_before(
    isr: tuple[int, ...], elr: tuple[int, ...], answers: tuple[Any, ...]
) -> None:
    assert await Leader(*answers, isr=isr, elr=elr).resigns()


@pytest.mark.parametrize("answer", [HAS_IT, HAS_IT_DAMAGED, DOWN, KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)])
@pytest.mark.parametrize("isr", [(1, 2, 3), (1, 2)])
async def test_it_goes_on_while_any_replica_may_have_it(isr: tuple[int, ...], answer: Any) -> None:
    """One that is not in sync may have what only its leader acknowledged."""
    assert not await Leader(ENDS_AT_IT, answer, isr=isr).resigns()


@pytest.mark.parametrize(("isr", "elr"), [((1, 2), ()), ((1,), (2,)), ((1,), (2, 3))])
async def test_a_dead_replica_is_waited_for_for_a_while(isr: tuple[int, ...], elr: tuple[int, ...]) -> None:
    """The partition cannot be written meanwhile, and nothing committed depends on it."""
    leader = Leader(ENDS_AT_IT, DOWN, isr=isr, elr=elr)
    leader.dead = {3}
    assert not await leader.resigns()
    leader.now_s += DEAD_REPLICA_WAIT_S - 1
    assert not await leader.resigns()
    leader.now_s += 2
    assert await leader.resigns()


async def test_a_dead_replica_is_waited_for_anew_for_other_damage() -> None:
    leader = Leader(ENDS_AT_IT, DOWN, isr=(1, 2))
    leader.dead = {3}
    assert not await leader.resigns()
    leader.leaders.forget(leader.partition)
    leader.now_s += DEAD_REPLICA_WAIT_S + 1
    assert not await leader.resigns()


async def test_a_dead_replica_that_comes_back_with_the_records_is_heard() -> None:
    leader = Leader(ENDS_AT_IT, DOWN, isr=(1, 2))
    leader.dead = {3}
    assert not await leader.resigns()
    leader.now_s += DEAD_REPLICA_WAIT_S + 1
    leader.answers[3] = HAS_IT
    assert not await leader.resigns()


async def test_it_goes_on_where_the_only_eligible_replica_is_dead() -> None:
    leader = Leader(DOWN, ENDS_AT_IT, isr=(1,), elr=(2,))
    leader.dead = {2}
    leader.now_s += DEAD_REPLICA_WAIT_S + 1
    assert not await leader.resigns()


async def test_it_waits_until_who_may_lead_has_copied_what_lies_before() -> None:
    assert not await Leader(ENDS_AT_IT, ENDS_BEFORE, isr=(1, 2, 3)).resigns()


async def test_it_goes_on_where_nobody_else_may_lead() -> None:
    assert not await Leader(ENDS_AT_IT, ENDS_AT_IT, isr=(1,)).resigns()


async def test_it_goes_on_where_the_damage_is_committed() -> None:
    leader = Leader(ENDS_AT_IT, ENDS_AT_IT)
    leader.partition.log.high_watermark = 6
    assert not await leader.resigns()


def come_back(leader: Leader) -> None:
    """The answer was for the log of a process that is gone."""
    leader.epochs[2] += 1


def change_isr(leader: Leader) -> None:
    leader.assigned = replace(leader.assigned, partition_epoch=8)


def commit(leader: Leader) -> None:
    leader.partition.log.high_watermark = 6


def lose_the_lead(leader: Leader) -> None:
    leader.partition.leads = False


@pytest.mark.parametrize("change", [come_back, change_isr, commit, lose_the_lead])
async def test_it_goes_on_where_the_answers_are_stale(change: Any) -> None:
    leader = Leader(ENDS_AT_IT, ENDS_AT_IT)
    leader.while_asked = lambda: change(leader)
    assert not await leader.resigns()


async def test_one_change_of_the_isr_at_a_time() -> None:
    leader = Leader(ENDS_AT_IT, ENDS_AT_IT)
    leader.while_asked = lambda: leader.partition.in_sync.shrinkage(9, 1e9, 11)
    assert not await leader.resigns()
