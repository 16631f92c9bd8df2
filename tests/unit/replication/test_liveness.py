"""Sessions: renewed by heartbeats, ended by silence, never by this node's own sleep."""

from __future__ import annotations

import pytest

from tidelog.replication.controller.decisions.liveness import BrokerSessions, BrokerState

F, U, C, N = BrokerState.FENCED, BrokerState.UNFENCED, BrokerState.CONTROLLED_SHUTDOWN, BrokerState.SHUTDOWN_NOW


def sessions(*broker_ids, fenced=False):
    found = BrokerSessions(100)
    for broker_id in broker_ids:
        found.register(broker_id, 10 + broker_id, fenced=fenced, now_ms=0)
    return found


def wish(one, broker_id=1, *, fence=False, shut_down=False, caught_up=True, leads=False):
    return one.next_state(
        broker_id, want_fence=fence, want_shut_down=shut_down, is_caught_up=caught_up, leads_any=leads
    )


@pytest.mark.parametrize(
    ("wishes", "after"),
    [
        ({}, U),
        ({"caught_up": False}, F),
        ({"fence": True}, F),
        ({"shut_down": True}, N),
        ({"fence": True, "shut_down": True}, N),
    ],
)
def test_a_fenced_broker(wishes, after):
    assert wish(sessions(1, fenced=True), **wishes) == (F, after)


@pytest.mark.parametrize(
    ("wishes", "after"),
    [
        ({}, U),
        ({"caught_up": False}, U),
        ({"fence": True}, F),
        ({"fence": True, "shut_down": True}, N),
        ({"shut_down": True}, N),
        ({"shut_down": True, "leads": True}, C),
    ],
)
def test_an_unfenced_broker(wishes, after):
    assert wish(sessions(1), **wishes) == (U, after)


def test_a_leaving_broker_waits_until_everybody_knows():
    found = sessions(1, 2, 3)
    found.enter_controlled_shutdown(1, 50)
    found.enter_controlled_shutdown(1, 70)  # the first one counts
    assert wish(found, shut_down=True, leads=True) == (C, C)
    found.touch(2, U, 50, 1)
    found.touch(3, U, 49, 1)
    assert wish(found, shut_down=True) == (C, C)
    found.touch(3, U, 50, 1)
    assert wish(found, shut_down=True) == (C, N)
    found.touch(1, N, 50, 1)
    assert wish(found) == (F, U)


def test_a_leaving_broker_that_was_fenced_may_stay_after_all():
    found = sessions(1, 2)
    found.enter_controlled_shutdown(1, 50)
    found.fence([1])
    assert wish(found) == (F, U)


def test_all_who_were_silent_too_long_are_stale_together():
    found = sessions(1, 2, 3)
    found.register(4, 14, fenced=True, now_ms=0)
    found.touch(2, U, 5, 60)
    assert found.stale(100) == []
    assert found.stale(101) == [1, 3]
    found.fence([1, 3])
    assert found.stale(101) == []
    assert not found.has_valid_session(1, 101)
    assert found.has_valid_session(2, 101)


def test_a_sleep_of_this_node_is_nobodys_silence():
    found = sessions(1)
    found.forgive(1000)
    assert found.stale(1050) == []
    assert found.stale(1101) == [1]


def test_a_new_registration_is_a_new_session():
    found = sessions(1)
    found.register(1, 99, fenced=True, now_ms=500)
    assert found.epoch_of(1) == 99
    assert not found.has_valid_session(1, 500)
    found.remove(1)
    assert found.epoch_of(1) == -1
