from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.coordinators.timers import TimerQueue


def test_a_key_is_due_at_its_time_and_once():
    timers: TimerQueue[str] = TimerQueue()
    timers.set("a", 10)
    assert timers.pop_due(9) is None
    assert timers.pop_due(10) == "a"
    assert timers.pop_due(99) is None


def test_a_deadline_can_be_put_off_brought_forward_and_cancelled():
    timers: TimerQueue[str] = TimerQueue()
    timers.set("off", 10)
    timers.set("off", 30)
    timers.set("forward", 30)
    timers.set("forward", 5)
    timers.set("cancelled", 7)
    timers.cancel("cancelled")
    assert timers.next_deadline_ms() == 5
    assert [timers.pop_due(29), timers.pop_due(29)] == ["forward", None]
    assert timers.pop_due(30) == "off"


def test_heartbeats_do_not_grow_the_queue():
    timers: TimerQueue[int] = TimerQueue()
    for now in range(10_000):
        timers.set(now % 10, now + 1000)
        timers.set(-now, now + 1000)
        timers.cancel(-now)
    assert len(timers) <= 11
    assert len(timers._heap) < 200


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 50)),
            st.tuples(st.just("cancel"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("due"), st.just(0), st.integers(0, 50)),
        )
    )
)
def test_it_behaves_as_a_plain_dictionary_of_deadlines(steps):
    timers: TimerQueue[int] = TimerQueue()
    model: dict[int, int] = {}
    for step, key, time in steps:
        if step == "set":
            timers.set(key, time)
            model[key] = time
        elif step == "cancel":
            timers.cancel(key)
            model.pop(key, None)
        else:
            due = set()
            while (popped := timers.pop_due(time)) is not None:
                due.add(popped)
            assert due == {each for each, deadline in model.items() if deadline <= time}
            model = {each: deadline for each, deadline in model.items() if deadline > time}
        following = timers.next_deadline_ms()
        assert (following is None) == (not model)
        assert following is None or following <= min(model.values())
        assert len(timers) == len(model)
