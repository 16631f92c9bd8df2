"""The short ways of a follower's fetch send and answer, byte for byte, what the general ways do.

A history of replicas runs twice: with the short ways of the leader (a request that differs only in session epoch and
offset from one before), of its answers, and of the follower (an answer whose beginning is known, one usual batch);
and without them. Elections, deletions, restarts and a bad network are in it. All that the nodes send is compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.replica_history import ReplicaHistory
from tests.unit.replication.replicas import FakeLink
from tidelog.broker.replicas.fetching import follower_answers, follower_fetches
from tidelog.replication import leader_link

Traffic = list[tuple[Any, ...]]


@contextmanager
def recorded() -> Iterator[Traffic]:
    """The requests and answers between nodes, in order."""
    found: Traffic = []
    request = FakeLink.request

    def note(self: Any, api_key: int, version: int, body: bytes | bytearray, on_response: Any) -> None:
        nodes = (self._source, self._target)
        found.append((*nodes, api_key, bytes(body)))

        def answered(answer: memoryview | None) -> None:
            found.append((*nodes, None if answer is None else bytes(answer)))
            on_response(answer)

        request(self, api_key, version, body, answered)

    with patch.object(FakeLink, "request", note):
        yield found


def in_general_ways(stack: ExitStack) -> None:
    answers = follower_answers.FollowerAnswers
    many = answers._frames_of_many

    def frames(self: Any, session: Any, number: int, version: int, must_answer: bool, is_full: bool = False) -> Any:
        return many(self, session, number, version, must_answer, is_full)

    stack.enter_context(patch.object(follower_fetches.FollowerFetches, "serve_one", lambda *_: None))
    stack.enter_context(patch.object(answers, "frames", frames))
    stack.enter_context(patch.object(leader_link, "decode_one_fetched", lambda body: None))
    stack.enter_context(patch.object(leader_link, "append_usual_as_follower", lambda *_: None))


def traffic_of(seed: int, *, is_short: bool) -> tuple[Traffic, dict[int, tuple[int, int]], Counter[str]]:
    """What the nodes of one history send, how its logs end, and how often the short ways were taken."""
    taken: Counter[str] = Counter()

    def counting(name: str, way: Any) -> Any:
        def count(*args: Any) -> Any:
            found = way(*args)
            taken[name] += found is not None
            return found

        return count

    with ExitStack() as stack:
        if not is_short:
            in_general_ways(stack)
        for owner, name in (
            (follower_fetches.FollowerFetches, "serve_one"), (leader_link, "decode_one_fetched"),
            (leader_link, "append_usual_as_follower"),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, counting(name, getattr(owner, name))))
        traffic = stack.enter_context(recorded())
        history = ReplicaHistory(seed, {"produce": 60, "run_on": 20} if seed % 4 else None)
        history.run()
        return traffic, history.cluster.marks(), taken


@given(st.integers(0, 2**32))
def test_the_short_ways_send_and_answer_what_the_general_ways_do(seed: int) -> None:
    short, short_marks, _ = traffic_of(seed, is_short=True)
    general, general_marks, taken = traffic_of(seed, is_short=False)
    assert not taken.total()
    for number, (one, other) in enumerate(zip(short, general, strict=False)):
        assert one == other, f"number {number}"
    assert (len(short), short_marks) == (len(general), general_marks)


def test_most_fetches_of_a_history_take_the_short_ways() -> None:
    traffic, _, taken = traffic_of(43, is_short=True)
    assert taken["serve_one"] > len(traffic) / 4
    assert taken["decode_one_fetched"] > len(traffic) / 4
    assert taken["append_usual_as_follower"] > 5
