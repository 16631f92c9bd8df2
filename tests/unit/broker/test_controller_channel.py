"""Requests of clients on their way to the controller: each has a connection of its own while it is under way."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.patience import PATIENCE_S, until
from tests.unit.replication.controller_harness import cluster
from tidelog.broker.cluster import controller_channel
from tidelog.broker.cluster.controller_channel import ControllerChannel, forwarding_ms
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import CreateTopicsRequest
from tidelog.protocol.messages.describe_quorum import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    DescribeQuorumResponsePartitionData,
    DescribeQuorumResponseTopicData,
)
from tidelog.protocol.messages.envelope import EnvelopeRequest, EnvelopeResponse
from tidelog.replication.controller.controller import LARGE_UNDER_WAY_MAX
from tidelog.replication.controller.decisions.state import NewTopic
from tidelog.replication.ports import Endpoint, PeerUnreachable


class Controller:
    """The other end: notes the lanes in use, and answers once `gate` is set; a lane in `silent` is never answered."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self.used: list[str] = []
        self.most_at_once = 0
        self.gate = asyncio.Event()
        self.silent: set[str] = set()
        self.leader: Endpoint | None = Endpoint("controller", 9093)
        self.asked: list[Endpoint] = []
        self.committed_offset = 41
        self.awaited: dict[int, asyncio.Future[None]] = {}
        """Offsets of metadata records that this node is to publish before a client has its answer."""
        self.channel = ControllerChannel(
            is_local=lambda: False,
            local=self._never,
            leader=lambda: self.leader,
            exchange=self._exchange,
            loop=asyncio.get_running_loop(),
            rng=random.Random(0),
        )

    async def _never(self, request: Any, version: int) -> Any:
        raise AssertionError("it is another node")

    async def _exchange(
        self, endpoint: Endpoint, request: Any, version: int, *, timeout_ms: int, lane: str = "", **_: Any
    ) -> Any:
        self.asked.append(endpoint)
        self.lanes.append(lane)
        self.used.append(lane)
        self.most_at_once = max(self.most_at_once, len(self.lanes))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                if lane in self.silent:
                    await asyncio.get_running_loop().create_future()
                await self.gate.wait()
        except TimeoutError:
            raise PeerUnreachable("no answer in time") from None
        finally:
            self.lanes.remove(lane)
        if isinstance(request, DescribeQuorumRequest):
            partition = DescribeQuorumResponsePartitionData(high_watermark=self.committed_offset + 1)
            return DescribeQuorumResponse(topics=[DescribeQuorumResponseTopicData(partitions=[partition])])
        return EnvelopeResponse(response_data=b"answer")

    def lags(self) -> None:
        """From now on this node publishes metadata when the test does it."""

        def published(offset: int) -> asyncio.Future[None]:
            return self.awaited.setdefault(offset, asyncio.get_running_loop().create_future())

        self.channel._published = published


async def test_requests_under_way_share_no_connection() -> None:
    """What happens to one of them, a timeout say, happens to no other."""
    controller = Controller()
    requests = [asyncio.ensure_future(controller.channel.forward(b"request", "127.0.0.1")) for _ in range(3)]
    requests.append(asyncio.ensure_future(controller.channel.create_topics([NewTopic("t", 1, 1)])))  # type: ignore[arg-type]
    await until(lambda: len(controller.lanes) == 4)
    assert len(set(controller.lanes)) == 4
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


async def test_a_request_whose_time_is_up_leaves_the_others_alone() -> None:
    controller = Controller()
    first = asyncio.ensure_future(controller.channel.forward(b"request", "127.0.0.1", 50))
    await until(lambda: len(controller.lanes) == 1)
    controller.silent = set(controller.lanes)
    second = asyncio.ensure_future(controller.channel.forward(b"request", "127.0.0.1"))
    with pytest.raises(KafkaError) as caught:
        await first
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    controller.gate.set()
    assert await second == b"answer"
    assert controller.used.count(controller.used[1]) == 1, "it was sent once"


async def test_a_connection_is_used_again() -> None:
    controller = Controller()
    controller.gate.set()
    for _ in range(3):
        assert await controller.channel.forward(b"request", "127.0.0.1") == b"answer"
    assert len(set(controller.used)) == 1


async def test_the_connections_are_bounded_and_the_rest_wait_their_turn() -> None:
    controller = Controller()
    more = controller_channel.FORWARDED_REQUESTS_MAX + 5
    requests = [asyncio.ensure_future(controller.channel.forward(b"request", "127.0.0.1")) for _ in range(more)]
    await until(lambda: len(controller.lanes) == controller_channel.FORWARDED_REQUESTS_MAX)
    with pytest.raises(KafkaError) as caught:
        await controller.channel.forward(b"request", "127.0.0.1", 20)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    controller.gate.set()
    assert await asyncio.gather(*requests) == [b"answer"] * more
    assert controller.most_at_once == controller_channel.FORWARDED_REQUESTS_MAX


async def test_a_request_to_a_controller_that_hangs_goes_to_the_next_one() -> None:
    controller = Controller()
    frozen = controller.leader
    controller.silent.add("forward-0")
    request = asyncio.ensure_future(controller.channel.forward(b"request", "127.0.0.1", timeout_ms=600_000))
    await until(lambda: controller.asked == [frozen])
    controller.leader = None
    controller.channel.on_leader_changed()
    await asyncio.sleep(0)
    assert controller.lanes, "nobody else is there to be asked"
    controller.leader = Endpoint("controller", 9094)
    controller.gate.set()
    controller.silent.clear()
    controller.channel.on_leader_changed()
    async with asyncio.timeout(PATIENCE_S):
        assert await request == b"answer"
    assert not controller.lanes


async def test_a_controller_that_still_leads_is_waited_for() -> None:
    controller = Controller()
    request = asyncio.ensure_future(controller.channel.forward(b"request", "127.0.0.1"))
    await until(lambda: len(controller.lanes) == 1)
    controller.channel.on_leader_changed()
    await asyncio.sleep(0.01)
    controller.gate.set()
    assert await request == b"answer"
    assert len(controller.asked) == 1


@pytest.mark.parametrize(("timeout_ms", "expected_ms"), [(700, 1_200), (0, 30_000), (600_000, 30_000)])
def test_a_forwarded_request_takes_as_long_as_its_client_waits(timeout_ms: int, expected_ms: int) -> None:
    assert forwarding_ms(CreateTopicsRequest(timeout_ms=timeout_ms)) == expected_ms
    assert forwarding_ms(EnvelopeRequest()) == 30_000


CREATE = (19).to_bytes(2, "big") + b"request"


async def test_an_answer_waits_until_this_node_has_what_the_controller_committed() -> None:
    """Else a client that creates a topic and asks this node for it at once would hear that there is none."""
    controller = Controller()
    controller.lags()
    controller.gate.set()
    request = asyncio.ensure_future(controller.channel.forward(CREATE, "127.0.0.1"))
    await until(lambda: 41 in controller.awaited)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not request.done()
    controller.awaited[41].set_result(None)
    assert await asyncio.wait_for(request, PATIENCE_S) == b"answer"


async def test_an_answer_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_channel, "CATCH_UP_MS_MAX", 20)
    controller = Controller()
    controller.lags()
    controller.gate.set()
    assert await asyncio.wait_for(controller.channel.forward(CREATE, "127.0.0.1"), PATIENCE_S) == b"answer"
    assert list(controller.awaited) == [41]


@pytest.mark.parametrize("api_key", [46, 55], ids=["ListPartitionReassignments", "DescribeQuorum"])
async def test_what_changes_nothing_is_answered_at_once(api_key: int) -> None:
    controller = Controller()
    controller.lags()
    controller.gate.set()
    frame = api_key.to_bytes(2, "big") + b"request"
    assert await asyncio.wait_for(controller.channel.forward(frame, "127.0.0.1"), PATIENCE_S) == b"answer"
    assert not controller.awaited


@pytest.mark.slow
async def test_small_requests_do_not_wait_behind_large_ones_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """These waited at the controller one behind another, and held all connections of this broker to it."""
    _, member, _ = await cluster()
    never = asyncio.Event()

    async def pause() -> None:
        await never.wait()

    member.controller.pause = pause
    controller = Controller()

    async def exchange(endpoint: Endpoint, request: Any, version: int, **options: Any) -> EnvelopeResponse:
        name = bytes(request.request_data).decode()
        topic = NewTopic(name, 1 if name == "small" else 61, 1)
        try:
            await member.controller.create_topics([topic])
        except KafkaError as refusal:
            return EnvelopeResponse(error_code=refusal.code)
        return EnvelopeResponse(response_data=b"answer")

    monkeypatch.setattr(controller.channel, "_exchange", exchange)
    forward = controller.channel.forward
    count = LARGE_UNDER_WAY_MAX + 32
    assert count < controller_channel.FORWARDED_REQUESTS_MAX
    large = [asyncio.ensure_future(forward(f"large-{number}".encode(), "127.0.0.1")) for number in range(count)]
    assert await asyncio.wait_for(forward(b"small", "127.0.0.1"), PATIENCE_S) == b"answer"
    never.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*large, return_exceptions=True), PATIENCE_S)
    assert {each.code for each in outcomes if isinstance(each, KafkaError)} == {ErrorCode.THROTTLING_QUOTA_EXCEEDED}
    assert outcomes.count(b"answer") == LARGE_UNDER_WAY_MAX
