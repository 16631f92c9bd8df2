"""Answers to Metadata for all topics are shared between clients, while nothing changes on which they depend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.metadata_services import context, encoded, running_services
from tidelog.broker.apis.cluster import metadata
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster import metadata_answers
from tidelog.broker.cluster.metadata_answers import AnswerKey, EncodedAnswer, MetadataAnswers
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.replication.controller.decisions.state import NewTopic

NO_OPERATIONS = -(2**31)


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with running_services(tmp_path) as running:
        yield running


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One element for each answer that is made anew."""
    views: list[object] = []

    class Counted(metadata._View):
        def __init__(self, *arguments: Any) -> None:
            views.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(metadata, "_View", Counted)
    return views


async def create(services: Services, name: str, partitions: int = 2) -> None:
    assert services.controller is not None
    await services.controller.create_topics([NewTopic(name, partitions, 1)])


async def ask_all(services: Services, version: int = 12, *, listener: str = "PLAINTEXT", **options: bool) -> Any:
    request = MetadataRequest(topics=None, **options)
    answer: Any = metadata.handle(services, context(version, listener=listener), request)
    return encoded(await answer if asyncio.iscoroutine(answer) else answer, version)


@pytest.mark.parametrize("partitions", [2, metadata.AT_ONCE_MAX * 2])
async def test_one_answer_is_made_for_many_clients(services: Services, made: list[object], partitions: int) -> None:
    """At 5,000 partitions each took 19 ms: 2,000 clients that consume by a pattern took 38 s after each change."""
    await create(services, "a", partitions)
    first = await ask_all(services)
    assert [len(topic.partitions) for topic in first.topics] == [partitions]
    for _ in range(10):
        assert await ask_all(services) == first
    assert len(made) == 1


async def test_a_change_of_the_metadata_is_in_the_next_answer(services: Services, made: list[object]) -> None:
    for count, name in enumerate("abc", start=1):
        await create(services, name)
        assert [topic.name for topic in (await ask_all(services)).topics] == [*"abc"[:count]]
    assert len(made) == 3


async def test_versions_listeners_and_options_have_answers_of_their_own(services: Services) -> None:
    await create(services, "a")
    for _ in range(2):
        assert (await ask_all(services, 5)).topics[0].partitions[0].leader_id == 1
        other = await ask_all(services, listener="OTHER")
        assert (other.brokers, other.topics[0].partitions[0].error_code) == ([], ErrorCode.LISTENER_NOT_FOUND)
        plain = await ask_all(services, 10)
        assert plain.topics[0].topic_authorized_operations == NO_OPERATIONS
        assert plain.cluster_authorized_operations == NO_OPERATIONS
        asked = await ask_all(services, 10, include_topic_authorized_operations=True)
        assert asked.topics[0].topic_authorized_operations != NO_OPERATIONS
        assert asked.cluster_authorized_operations == NO_OPERATIONS
        asked = await ask_all(services, 10, include_cluster_authorized_operations=True)
        assert asked.topics[0].topic_authorized_operations == NO_OPERATIONS
        assert asked.cluster_authorized_operations != NO_OPERATIONS


async def test_what_changes_without_the_metadata_is_in_the_next_answer(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fenced broker is listed for some seconds; and the controller is unknown while the quorum elects."""
    await create(services, "a")
    image = services.image()
    brokers = {
        **image.brokers,
        2: replace(image.brokers[1], node_id=2),
        3: replace(image.brokers[1], node_id=3, fenced=True),
    }
    image = replace(image, brokers=brokers, controller_id=2)
    services.image = lambda: image
    fenced: set[int] = {3}
    leader_id = 2
    monkeypatch.setattr(services.lost_brokers, "recently_fenced", lambda: fenced)
    monkeypatch.setattr(Services, "quorum_leader_id", lambda self: leader_id)
    answer = await ask_all(services)
    assert ([broker.node_id for broker in answer.brokers], answer.controller_id) == ([1, 2, 3], 2)
    fenced = set()
    leader_id = 7
    answer = await ask_all(services)
    assert ([broker.node_id for broker in answer.brokers], answer.controller_id) == ([1, 2], 1)


async def test_an_answer_during_which_something_changes_is_not_kept(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(services, "a", metadata.AT_ONCE_MAX * 2)
    running = asyncio.ensure_future(ask_all(services))
    key = metadata._key(services, context(12), MetadataRequest(topics=None))
    for _ in range(4):
        await asyncio.sleep(0)
    fenced = {9}
    monkeypatch.setattr(services.lost_brokers, "recently_fenced", lambda: fenced)
    await running
    assert services.metadata_answers.find(key) is None


async def test_errors_of_a_kept_answer_are_counted_again(services: Services) -> None:
    await create(services, "a", 5)
    for _ in range(3):
        await ask_all(services, listener="OTHER")
    errors = services.requests.of("Metadata", MetadataRequest.VERSIONS).errors
    assert errors == {ErrorCode.LISTENER_NOT_FOUND: 15}


def test_few_and_small_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones would wait in memory for each client that asks at the same time."""
    monkeypatch.setattr(metadata_answers, "KEPT_MAX", 2)
    monkeypatch.setattr(metadata_answers, "KEPT_BYTES_MAX", 10)
    answers = MetadataAnswers()
    keys = [AnswerKey(offset, 1, 1, frozenset(), "PLAINTEXT", 12, False, False) for offset in range(3)]
    for key in (keys[0], keys[1], keys[1], keys[2]):
        answers.keep(key, EncodedAnswer(b"0123456789", {}))
    assert [answers.find(key) is not None for key in keys] == [False, True, True]
    large = keys[0]._replace(offset=9)
    answers.keep(large, EncodedAnswer(b"0123456789a", {}))
    assert answers.find(large) is None
    assert answers.find(keys[2]) is not None
