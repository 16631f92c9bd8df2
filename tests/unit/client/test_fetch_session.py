"""Fetch sessions: full first, then what changed, and full again after anything went wrong."""

from __future__ import annotations

from tidelog.client.consuming.fetch_session import FetchSession, FetchTarget
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import ErrorCode

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
ID, OTHER_ID = bytes(15) + b"\1", bytes(15) + b"\2"


def target(offset: int, topic_id: bytes = ID) -> FetchTarget:
    return FetchTarget(topic_id, offset, 0, -1, 1000)


def established() -> FetchSession:
    session = FetchSession()
    session.plan({A: target(0), B: target(0)})
    session.handle_response(ErrorCode.NONE, 77)
    return session


def test_the_first_request_says_everything():
    plan = FetchSession().plan({A: target(0), B: target(5)})
    assert (plan.session_id, plan.epoch) == (0, 0)
    assert plan.to_send == {A: target(0), B: target(5)}


def test_the_next_says_only_what_changed_and_what_is_over():
    session = established()
    plan = session.plan({A: target(10)})
    assert (plan.session_id, plan.epoch) == (77, 1)
    assert plan.to_send == {A: target(10)}
    assert plan.to_forget == [(B, ID)]
    session.handle_response(ErrorCode.NONE, 77)
    plan = session.plan({A: target(10), B: target(3)})
    assert (plan.epoch, plan.to_send, plan.to_forget) == (2, {B: target(3)}, [])


def test_a_topic_made_anew_is_forgotten_by_its_old_id():
    session = established()
    plan = session.plan({A: target(0, OTHER_ID), B: target(0)})
    assert plan.to_send == {A: target(0, OTHER_ID)}
    assert plan.to_forget == [(A, ID)]


def test_a_session_the_broker_lost_is_started_without_its_id():
    session = established()
    session.plan({A: target(1)})
    session.handle_response(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, 0)
    plan = session.plan({A: target(1)})
    assert (plan.session_id, plan.epoch, plan.to_send) == (0, 0, {A: target(1)})


def test_an_answer_that_never_came_starts_over_in_place_of_the_old_session():
    session = established()
    session.plan({A: target(1)})
    session.handle_failure()
    plan = session.plan({A: target(1)})
    assert (plan.session_id, plan.epoch, plan.to_send) == (77, 0, {A: target(1)})


def test_a_broker_that_keeps_no_session_gets_full_fetches():
    session = FetchSession()
    for _ in range(3):
        plan = session.plan({A: target(0)})
        assert (plan.session_id, plan.epoch, plan.to_send) == (0, 0, {A: target(0)})
        session.handle_response(ErrorCode.NONE, 0)


def test_the_epoch_wraps_to_one():
    session = established()
    session._epoch = 2**31 - 1
    session.plan({})
    session.handle_response(ErrorCode.NONE, 77)
    assert session.plan({}).epoch == 1
