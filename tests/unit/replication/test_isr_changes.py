"""ISR changes on their way: gathered while one is open, repeated while nobody answers, given up when overtaken."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.alter_partition import (
    AlterPartitionRequest,
    AlterPartitionResponse,
    AlterPartitionResponsePartitionData,
    AlterPartitionResponseTopicData,
)
from tidelog.replication import isr_changes
from tidelog.replication.isr import InSyncReplicas, Proposal
from tidelog.replication.isr_changes import IsrChanges
from tidelog.replication.ports import PeerUnreachable

TOPIC = b"t" * 16


class Replica:
    """As much of a leading Partition as has to do with proposals."""

    def __init__(self, index: int) -> None:
        self.topic_id, self.index, self.leads = TOPIC, index, True
        self.in_sync = InSyncReplicas(1, 1000)
        self.in_sync.assign((1, 2), (1, 2), 5, 7, 0, 0.0)
        self.outcome: Any = None

    def propose(self) -> Proposal:
        proposal = self.in_sync.shrinkage(9, 5000.0, 44)
        assert proposal is not None
        return proposal

    def on_proposal_agreed(self, proposal: Proposal, partition_epoch: int) -> None:
        assert proposal is self.in_sync.pending
        isr = tuple(member for member, _ in proposal.isr)
        self.in_sync.assign((1, 2), isr, 5, partition_epoch, 0, 0.0)  # the metadata comes at once
        self.outcome = isr

    def on_proposal_rejected(self, proposal: Proposal) -> None:
        self.in_sync.withdraw(proposal)
        self.outcome = "rejected"


class Controller:
    """Answers with what it is given, one for each request, then as it should; `gate` holds the answers back."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.requests: list[AlterPartitionRequest] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def call(self, request: AlterPartitionRequest, version: int) -> AlterPartitionResponse:
        assert AlterPartitionRequest.decode(request.encode(version), version) == request
        self.requests.append(request)
        await self.gate.wait()
        answer = self.answers.pop(0) if self.answers else ErrorCode.NONE
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, AlterPartitionResponse):
            return answer
        return AlterPartitionResponse(
            topics=[
                AlterPartitionResponseTopicData(
                    topic_id=topic.topic_id,
                    partitions=[
                        AlterPartitionResponsePartitionData(
                            partition_index=asked.partition_index,
                            error_code=answer,
                            leader_id=1,
                            leader_epoch=asked.leader_epoch,
                            isr=[member.broker_id for member in asked.new_isr_with_epochs],
                            partition_epoch=asked.partition_epoch + 1,
                        )
                        for asked in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def indexes(self) -> list[list[int]]:
        return [[asked.partition_index for asked in request.topics[0].partitions] for request in self.requests]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isr_changes, "BACKOFF_MS_INITIAL", 0)
    monkeypatch.setattr(isr_changes, "BACKOFF_MS_MAX", 0)


def changes_to(controller: Controller) -> IsrChanges:
    return IsrChanges(
        broker_id=1,
        broker_epoch=lambda: 44,
        call=controller.call,
        loop=asyncio.get_running_loop(),
        rng=random.Random(1),
    )


async def until_idle(changes: IsrChanges) -> None:
    while changes._task is not None:  # noqa: ASYNC110
        await asyncio.sleep(0)


def submit(changes: IsrChanges, replica: Any) -> None:
    changes.submit(replica, replica.propose())


async def test_what_comes_while_one_is_open_goes_together() -> None:
    controller = Controller()
    changes = changes_to(controller)
    replicas = [Replica(index) for index in range(4)]
    controller.gate.clear()
    submit(changes, replicas[0])
    await asyncio.sleep(0)
    for replica in replicas[1:]:
        submit(changes, replica)
    controller.gate.set()
    await until_idle(changes)
    assert controller.indexes() == [[0], [1, 2, 3]]
    assert [replica.outcome for replica in replicas] == [(1,)] * 4
    asked = controller.requests[0].topics[0].partitions[0]
    assert (controller.requests[0].broker_epoch, asked.leader_epoch, asked.partition_epoch) == (44, 5, 7)
    assert [(member.broker_id, member.broker_epoch) for member in asked.new_isr_with_epochs] == [(1, 44)]


@pytest.mark.slow
async def test_changes_of_very_many_partitions_go_in_requests_that_the_controller_takes() -> None:
    """One request for all is more than the controller decodes. It was repeated without end."""
    controller = Controller()
    changes = changes_to(controller)
    replicas = [Replica(index) for index in range(26_000)]
    for replica in replicas:
        submit(changes, replica)
    async with asyncio.timeout(PATIENCE_S):
        await until_idle(changes)
    assert [len(indexes) for indexes in controller.indexes()] == [isr_changes.ISR_CHANGES_AT_ONCE_MAX] * 26
    assert all(replica.outcome == (1,) for replica in replicas)


async def test_changes_that_are_refused_again_and_again_do_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They filled each request, and those behind them were never sent."""
    monkeypatch.setattr(IsrChanges, "in_one_request_max", 2)
    controller = Controller(ErrorCode.UNKNOWN_SERVER_ERROR, ErrorCode.NONE, ErrorCode.UNKNOWN_SERVER_ERROR)
    changes = changes_to(controller)
    for index in range(4):
        submit(changes, Replica(index))
    async with asyncio.timeout(PATIENCE_S):
        await until_idle(changes)
    assert controller.indexes() == [[0, 1], [2, 3], [0, 1], [0, 1]]


@pytest.mark.parametrize(
    "failure",
    [
        PeerUnreachable("gone"),
        TimeoutError(),
        AlterPartitionResponse(error_code=ErrorCode.NOT_CONTROLLER),
        AlterPartitionResponse(error_code=ErrorCode.STALE_BROKER_EPOCH),
        ErrorCode.UNKNOWN_SERVER_ERROR,
    ],
)
async def test_it_is_repeated_until_somebody_answers(failure: Any) -> None:
    controller = Controller(failure, failure)
    changes, replica = changes_to(controller), Replica(0)
    submit(changes, replica)
    await until_idle(changes)
    assert len(controller.requests) == 3
    assert replica.outcome == (1,)


@pytest.mark.parametrize("code", [ErrorCode.INELIGIBLE_REPLICA, ErrorCode.OPERATION_NOT_ATTEMPTED])
async def test_what_is_refused_for_good_is_taken_back(code: ErrorCode) -> None:
    changes, replica = changes_to(Controller(code)), Replica(0)
    submit(changes, replica)
    await until_idle(changes)
    assert replica.outcome == "rejected"
    assert replica.in_sync.pending is None


async def test_a_controller_that_takes_no_resignation_holds_up_no_later_change() -> None:
    """Kafka's answers INVALID_REQUEST to an ISR without the leader."""
    changes, replica = changes_to(Controller(ErrorCode.INVALID_REQUEST)), Replica(0)
    proposal = replica.in_sync.resignation(44)
    assert proposal is not None
    assert [member for member, _ in proposal.isr] == [2]
    changes.submit(replica, proposal)  # type: ignore[arg-type]
    await until_idle(changes)
    assert replica.outcome == "rejected"
    assert replica.in_sync.pending is None


@pytest.mark.parametrize(
    "code",
    [ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.INVALID_UPDATE_VERSION, ErrorCode.NEW_LEADER_ELECTED],
)
async def test_what_was_overtaken_stays_open_until_the_metadata_comes(code: ErrorCode) -> None:
    """It may have happened after all, by an earlier try: the maximal ISR must not shrink to what was committed."""
    controller = Controller(code)
    changes, replica = changes_to(controller), Replica(0)
    submit(changes, replica)
    await until_idle(changes)
    assert len(controller.requests) == 1
    assert replica.outcome is None
    assert replica.in_sync.pending is not None


async def test_a_proposal_that_the_metadata_has_overtaken_is_not_sent_again() -> None:
    controller = Controller(PeerUnreachable("gone"))
    changes, replica = changes_to(controller), Replica(0)
    submit(changes, replica)
    while not controller.requests:  # noqa: ASYNC110
        await asyncio.sleep(0)
    replica.in_sync.assign((1, 2), (1,), 5, 8, 0, 0.0)
    await until_idle(changes)
    assert len(controller.requests) == 1


async def test_nothing_is_sent_after_closing() -> None:
    controller = Controller()
    changes, replica = changes_to(controller), Replica(0)
    controller.gate.clear()
    submit(changes, replica)
    await asyncio.sleep(0)
    changes.close()
    controller.gate.set()
    await asyncio.sleep(0)
    assert replica.outcome is None
