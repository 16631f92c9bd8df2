"""The controller hears in which directory replicas lie, and hears it again until it has understood."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tidelog.broker.replicas import directory_assignments
from tidelog.broker.replicas.directory_assignments import DirectoryAssignments
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.assign_replicas_to_dirs import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsResponse,
    AssignReplicasToDirsResponseDirectoryData,
    AssignReplicasToDirsResponsePartitionData,
    AssignReplicasToDirsResponseTopicData,
)
from tidelog.replication.ports import PeerUnreachable

TOPIC, HERE, THERE = b"t" * 16, b"h" * 16, b"e" * 16


class Controller:
    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.told: list[dict[bytes, list[int]]] = []

    async def call(self, request: AssignReplicasToDirsRequest, version: int) -> AssignReplicasToDirsResponse:
        told = {each.id: [one.partition_index for one in each.topics[0].partitions] for each in request.directories}
        self.told.append(told)
        answer = self.answers.pop(0) if self.answers else {}
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return AssignReplicasToDirsResponse(error_code=answer)
        return AssignReplicasToDirsResponse(
            directories=[
                AssignReplicasToDirsResponseDirectoryData(
                    id=directory_id,
                    topics=[
                        AssignReplicasToDirsResponseTopicData(
                            topic_id=TOPIC,
                            partitions=[
                                AssignReplicasToDirsResponsePartitionData(
                                    partition_index=index, error_code=answer.get(index, 0)
                                )
                                for index in indexes
                            ],
                        )
                    ],
                )
                for directory_id, indexes in told.items()
            ]
        )


async def assign(controller: Controller) -> None:
    assignments = DirectoryAssignments(
        broker_id=1, broker_epoch=lambda: 5, call=controller.call, loop=asyncio.get_running_loop(), rng=random.Random(1)
    )
    for index, directory_id in ((0, HERE), (1, THERE), (2, HERE)):
        assignments.report(TOPIC, index, directory_id)
    assert assignments._task is not None
    await assignments._task
    assignments.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_assignments, "BACKOFF_MS_INITIAL", 0)
    monkeypatch.setattr(directory_assignments, "BACKOFF_MS_MAX", 0)


async def test_all_replicas_of_an_image_are_told_at_once() -> None:
    controller = Controller()
    await assign(controller)
    assert controller.told == [{HERE: [0, 2], THERE: [1]}]


@pytest.mark.parametrize(
    "failure", [PeerUnreachable("gone"), TimeoutError(), int(ErrorCode.NOT_CONTROLLER), ZeroDivisionError()]
)
async def test_what_did_not_arrive_is_told_again(failure: Any) -> None:
    controller = Controller(failure, failure)
    await assign(controller)
    assert controller.told == [{HERE: [0, 2], THERE: [1]}] * 3


async def test_only_what_was_refused_is_told_again_and_not_what_is_no_more() -> None:
    controller = Controller({1: ErrorCode.UNKNOWN_TOPIC_ID, 2: ErrorCode.UNKNOWN_SERVER_ERROR})
    await assign(controller)
    assert controller.told == [{HERE: [0, 2], THERE: [1]}, {HERE: [2]}]


@pytest.mark.parametrize(("told_again", "is_called"), [(THERE, True), (HERE, False)])
async def test_who_waits_hears_of_it_unless_it_was_taken_back(told_again: bytes, is_called: bool) -> None:
    """Metadata of before makes the hosting tell again what a move has told already."""
    heard: list[str] = []
    controller = Controller()
    assignments = DirectoryAssignments(
        broker_id=1, broker_epoch=lambda: 5, call=controller.call, loop=asyncio.get_running_loop(), rng=random.Random(1)
    )
    assignments.report(TOPIC, 0, THERE, lambda: heard.append("accepted"))
    assignments.report(TOPIC, 0, told_again)
    assert assignments._task is not None
    await assignments._task
    assignments.close()
    assert controller.told == [{told_again: [0]}]
    assert bool(heard) is is_called


async def test_a_replica_that_waits_for_the_answer_is_told_again_until_it_is_gone_here_too() -> None:
    """It was taken away and given back before the metadata came here, or will be gone as soon as the metadata comes."""
    heard: list[str] = []
    controller = Controller({0: ErrorCode.NOT_LEADER_OR_FOLLOWER, 1: ErrorCode.NOT_LEADER_OR_FOLLOWER})

    async def call(request: AssignReplicasToDirsRequest, version: int) -> AssignReplicasToDirsResponse:
        answer = await controller.call(request, version)
        assignments.forget(TOPIC, 1)
        return answer

    assignments = DirectoryAssignments(
        broker_id=1, broker_epoch=lambda: 5, call=call, loop=asyncio.get_running_loop(), rng=random.Random(1)
    )
    assignments.report(TOPIC, 0, THERE, lambda: heard.append("accepted"))
    assignments.report(TOPIC, 1, THERE, lambda: heard.append("gone"))
    assert assignments._task is not None
    await assignments._task
    assignments.close()
    assert controller.told == [{THERE: [0, 1]}, {THERE: [0]}]
    assert heard == ["accepted"]
