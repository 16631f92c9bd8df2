"""A broker and its controller: registering, being fenced and unfenced, being forgotten, leaving."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import PATIENCE_S, until
from tidelog.broker.cluster import lifecycle as lifecycle_module
from tidelog.broker.cluster.controller_channel import ControllerChannel
from tidelog.broker.cluster.lifecycle import (
    SHUTDOWN_MS_MAX,
    SHUTDOWN_SILENCE_MS,
    BrokerLifecycle,
    LifecycleSettings,
    RegistrationRefused,
)
from tidelog.cli.cluster.nodes import STOP_S
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest, BrokerHeartbeatResponse
from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest, BrokerRegistrationResponse
from tidelog.replication.ports import Endpoint, PeerUnreachable


class ActiveController:
    """Answers as told; `heard` is every request in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.registrations: list[int] = []
        self.heartbeat: Callable[[BrokerHeartbeatRequest], BrokerHeartbeatResponse] = lambda request: (
            BrokerHeartbeatResponse(is_fenced=request.want_fence)
        )
        self.next_epoch = 10
        self.is_there = True

    async def exchange(self, endpoint: Endpoint, request: Any, version: int, **_: Any) -> Any:
        await asyncio.sleep(0)
        if not self.is_there:
            raise PeerUnreachable("gone", refused=True)
        self.heard.append(request)
        if isinstance(request, BrokerRegistrationRequest):
            code = self.registrations.pop(0) if self.registrations else ErrorCode.NONE
            self.next_epoch += 1
            return BrokerRegistrationResponse(error_code=code, broker_epoch=self.next_epoch)
        return self.heartbeat(request)

    def heartbeats(self) -> list[BrokerHeartbeatRequest]:
        return [each for each in self.heard if isinstance(each, BrokerHeartbeatRequest)]


def made(
    controller: ActiveController,
    *,
    interval_ms: int = 20,
    on_registered: Callable[[int], None] = lambda epoch: None,
    session_timeout_ms: int = 9_000,
    deposed_controller_ms: float = 0,
) -> BrokerLifecycle:
    loop = asyncio.get_running_loop()

    async def local(request: Any, version: int) -> Any:
        raise AssertionError("there is no controller in this process")

    channel = ControllerChannel(
        is_local=lambda: False, local=local, leader=lambda: Endpoint("127.0.0.1", 1),
        exchange=cast(Any, controller.exchange), loop=loop, rng=random.Random(1),
    )  # fmt: skip
    return BrokerLifecycle(
        node_id=4,
        registration=lambda previous: BrokerRegistrationRequest(broker_id=4, previous_broker_epoch=previous),
        metadata_offset=lambda: 99,
        channel=channel,
        settings=LifecycleSettings(
            interval_ms, 1000, session_timeout_ms=session_timeout_ms, deposed_controller_ms=deposed_controller_ms
        ),
        loop=loop,
        rng=random.Random(2),
        on_registered=on_registered,
    )


async def test_a_broker_asks_to_be_unfenced_only_when_it_is_ready() -> None:
    controller = ActiveController()
    lifecycle = made(controller)
    assert await lifecycle.register(3) == 11
    assert controller.heard[0].previous_broker_epoch == 3
    await until(lambda: len(controller.heartbeats()) > 2)
    assert all(beat.want_fence and beat.broker_epoch == 11 for beat in controller.heartbeats())
    assert lifecycle.is_fenced
    await lifecycle.become_ready()
    assert not lifecycle.is_fenced
    assert controller.heartbeats()[-1].current_metadata_offset == 99
    await lifecycle.close()


async def test_it_counts_on_no_answer_that_a_replaced_controller_may_have_given() -> None:
    """The next controller's session of this broker may have begun before the last answered heartbeat was sent."""
    controller = ActiveController()
    lifecycle = made(controller, session_timeout_ms=60_000, deposed_controller_ms=59_500)
    await lifecycle.register(3)
    await lifecycle.become_ready()
    await until(lifecycle.has_session)
    controller.is_there = False
    await until(lambda: not lifecycle.has_session())
    assert lifecycle.is_heard()
    controller.is_there = True
    await until(lifecycle.has_session)
    await lifecycle.close()


async def test_readiness_waits_until_the_controller_agrees() -> None:
    controller = ActiveController()
    answers = iter([True, True, True, False])
    controller.heartbeat = lambda request: BrokerHeartbeatResponse(is_fenced=next(answers, False))
    lifecycle = made(controller)
    await lifecycle.register(3)
    await lifecycle.become_ready()
    assert len(controller.heartbeats()) >= 4
    await lifecycle.close()


async def test_a_registration_that_is_refused_with_a_code_of_a_later_version_is_tried_again() -> None:
    controller = ActiveController()
    controller.registrations = [12_345]
    lifecycle = made(controller)
    async with asyncio.timeout(PATIENCE_S):
        await lifecycle.register(3)
    assert (len(controller.heard), lifecycle.epoch) == (2, 12)
    await lifecycle.close()


async def test_heartbeats_go_on_after_an_answer_that_makes_no_sense(caplog: pytest.LogCaptureFixture) -> None:
    controller = ActiveController()
    controller.heartbeat = lambda request: cast(Any, BrokerRegistrationResponse())
    lifecycle = made(controller)
    await lifecycle.register(3)
    await until(lambda: len(controller.heartbeats()) >= 2)
    assert "a heartbeat failed" in caplog.text
    controller.heartbeat = lambda request: BrokerHeartbeatResponse(error_code=12_345)
    count = len(controller.heartbeats())
    await until(lambda: len(controller.heartbeats()) >= count + 2)
    assert lifecycle.is_fenced
    controller.heartbeat = lambda request: BrokerHeartbeatResponse(is_fenced=False)
    await lifecycle.become_ready()
    await lifecycle.close()


async def test_registration_is_tried_again_while_the_old_broker_counts_as_alive() -> None:
    controller = ActiveController()
    controller.registrations = [ErrorCode.NOT_CONTROLLER, ErrorCode.DUPLICATE_BROKER_REGISTRATION]
    lifecycle = made(controller)
    assert await lifecycle.register(3) == 13
    await lifecycle.close()


@pytest.mark.parametrize(
    ("line_interval_s", "levels"),
    [(60.0, ["INFO", "INFO"]), (0.0, ["INFO", "WARNING", "WARNING", "INFO"])],
    ids=["once in a while", "with what to do"],
)
async def test_an_id_that_another_process_has_is_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    line_interval_s: float,
    levels: list[str],
) -> None:
    monkeypatch.setattr(lifecycle_module, "_LINE_INTERVAL_S", line_interval_s)
    caplog.set_level("INFO", "tidelog.lifecycle")
    controller = ActiveController()
    controller.registrations = [ErrorCode.DUPLICATE_BROKER_REGISTRATION] * 3
    lifecycle = made(controller, session_timeout_ms=100)
    async with asyncio.timeout(PATIENCE_S):
        await lifecycle.register(3)
    lines = [record for record in caplog.records if "broker 4" in record.message]
    assert [line.levelname for line in lines] == levels
    assert all("give each node a node.id of its own" in line.message for line in lines if line.levelname == "WARNING")
    await lifecycle.close()


async def test_a_broker_of_another_cluster_is_told_so() -> None:
    controller = ActiveController()
    controller.registrations = [ErrorCode.INCONSISTENT_CLUSTER_ID]
    lifecycle = made(controller)
    with pytest.raises(RegistrationRefused, match="INCONSISTENT_CLUSTER_ID"):
        await lifecycle.register(3)
    await lifecycle.close()


async def test_a_broker_that_was_forgotten_registers_again_in_a_new_epoch() -> None:
    controller = ActiveController()
    known = 11

    def heartbeat(request: BrokerHeartbeatRequest) -> BrokerHeartbeatResponse:
        stale = request.broker_epoch != known
        return BrokerHeartbeatResponse(error_code=ErrorCode.STALE_BROKER_EPOCH if stale else 0, is_fenced=False)

    controller.heartbeat = heartbeat
    epochs: list[int] = []
    lifecycle = made(controller, on_registered=epochs.append)
    await lifecycle.register(3)
    await lifecycle.become_ready()
    known = 12
    await until(lambda: lifecycle.epoch == 12)
    assert epochs == [11, 12]
    again = [each for each in controller.heard if isinstance(each, BrokerRegistrationRequest)]
    assert [each.previous_broker_epoch for each in again] == [3, 11]
    await until(lambda: controller.heartbeats()[-1].broker_epoch == 12)
    await lifecycle.close()


async def test_heartbeats_outlive_a_controller_that_is_away() -> None:
    controller = ActiveController()
    lifecycle = made(controller)
    await lifecycle.register(3)
    await lifecycle.become_ready()
    controller.is_there = False
    await asyncio.sleep(0.1)
    heard = len(controller.heard)
    controller.is_there = True
    lifecycle.request_heartbeat()
    await until(lambda: len(controller.heard) > heard)
    await lifecycle.close()


async def test_leaving_waits_until_the_leaderships_have_moved() -> None:
    controller = ActiveController()
    asked = 0

    def heartbeat(request: BrokerHeartbeatRequest) -> BrokerHeartbeatResponse:
        nonlocal asked
        asked += request.want_shut_down
        return BrokerHeartbeatResponse(is_fenced=False, should_shut_down=asked >= 3)

    controller.heartbeat = heartbeat
    lifecycle = made(controller)
    await lifecycle.register(3)
    await lifecycle.become_ready()
    await lifecycle.shut_down()
    assert asked == 3
    await lifecycle.close()


async def test_leaving_does_not_wait_for_a_controller_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.broker.cluster.lifecycle.SHUTDOWN_SILENCE_MS", SHUTDOWN_SILENCE_MS // 20)
    controller = ActiveController()
    lifecycle = made(controller)
    await lifecycle.register(3)
    controller.is_there = False
    async with asyncio.timeout(PATIENCE_S):
        await lifecycle.shut_down()
    await lifecycle.close()


async def test_leaving_does_not_wait_for_good_for_a_controller_that_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tidelog.broker.cluster.lifecycle.SHUTDOWN_MS_MAX", 100)
    lifecycle = made(ActiveController())
    await lifecycle.register(3)
    await lifecycle.become_ready()
    async with asyncio.timeout(PATIENCE_S):
        await lifecycle.shut_down()
    assert "another broker may hang" in caplog.text
    await lifecycle.close()


def test_leaving_leaves_time_to_close_the_logs_before_who_stops_the_node_kills_it() -> None:
    assert SHUTDOWN_MS_MAX / 1000 <= STOP_S - 10


async def test_a_call_that_no_controller_answers_is_timed_out() -> None:
    controller = ActiveController()
    controller.is_there = False
    lifecycle = made(controller)
    with pytest.raises(KafkaError) as refused:
        await lifecycle._channel.call(BrokerHeartbeatRequest(), 1, timeout_ms=60)
    assert refused.value.code is ErrorCode.REQUEST_TIMED_OUT


async def test_a_session_begins_with_the_sending_of_a_heartbeat_that_is_acknowledged() -> None:
    controller = ActiveController()
    lifecycle = made(controller)
    now_s = 100.0
    lifecycle._loop = cast(Any, SimpleNamespace(time=lambda: now_s, create_task=lifecycle._loop.create_task))
    await lifecycle.register(3)
    assert not lifecycle.has_session()  # it is fenced
    await lifecycle.become_ready()
    assert lifecycle.has_session()
    await lifecycle.close()
    heartbeat = controller.heartbeats()[-1]
    acknowledged = BrokerHeartbeatResponse(is_fenced=False)
    now_s = 105.0
    lifecycle._handle_response(heartbeat, acknowledged, 102.0)
    now_s = 110.9
    assert lifecycle.has_session()
    now_s = 111.0
    assert not lifecycle.has_session()
    lifecycle._handle_response(heartbeat, acknowledged, 110.0)
    assert lifecycle.has_session()
    lifecycle._handle_response(heartbeat, BrokerHeartbeatResponse(is_fenced=True), 110.5)
    assert not lifecycle.has_session()
