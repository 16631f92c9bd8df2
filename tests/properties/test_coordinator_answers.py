"""Whatever befalls a coordinator's partition, each of its requests is answered, in the time that a write may take.

Writes are committed late, in part or never; the log is lost; another node is elected, then this one again, while what
was written may be committed all the same; appends are refused; records cannot be encoded. Then nothing happens any more
but that time passes. A request that is not answered would hold back all answers behind it on its connection.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.broker.coordinators.fakes import Reply
from tests.unit.broker.coordinators.test_runtime import Bench, _count
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.protocol.errors import ErrorCode, KafkaError

WRITE_TIMEOUT_MS = 1000
ACTIONS = [
    "write",
    "write",
    "write",
    "pair",
    "behind",
    "behind",
    "odd",
    "commit",
    "commit some",
    "lose",
    "elect",
    "resign",
]
ACTIONS += ["time", "time", "refuse", "follow"]


def run(steps: list[tuple[str, int]]) -> None:
    bench = Bench(commits_at_once=False)
    runtime, ports = bench.runtime, bench.ports
    replies: list[Reply] = []
    bench.elect()
    epoch = 1
    for what, number in steps:
        if what == "write":
            replies.append(bench.write(b"r%d" % number, context=number if number % 2 else None))
        elif what == "pair":
            replies.append(bench.write(b"a", b"b"))
        elif what == "behind":
            replies.append(Reply(lambda: runtime.submit(0, _count, after_pending_writes=True)))
        elif what == "odd":
            replies.append(bench.write(b"unencodable"))
        elif what == "commit":
            ports.commit(0)
        elif what == "commit some":
            ports.commit(0, ports.high_watermarks.get(0, 0) + number % 3)
        elif what == "lose":
            ports.lose(0, KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        elif what == "elect":
            epoch += number % 2
            runtime.on_elected(0, epoch)
        elif what == "resign":
            runtime.on_resigned(0)
            if number % 2:
                ports.truncate_uncommitted(0)
        elif what == "time":
            ports.advance(number * 150)
        elif what == "refuse":
            ports.refuse_appends = KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS) if number % 2 else None
        else:
            bench.tapes[-1].writes_when_committed.append(b"follows")
    ports.advance(WRITE_TIMEOUT_MS + 1)
    unanswered = [number for number, reply in enumerate(replies) if reply.is_parked]
    assert not unanswered, f"never answered: {unanswered} of {len(replies)}"


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9)), max_size=60))
def test_every_request_is_answered(steps: list[tuple[str, int]]) -> None:
    run(steps)


NEVER = [("write", 1), ("behind", 0)]


@pytest.mark.parametrize(
    ("broken", "steps"),
    [
        ("_arm_timer", NEVER),
        ("_on_timer", NEVER),
        ("_close", [*NEVER, ("lose", 0)]),
        ("_close", [*NEVER, ("resign", 0)]),
    ],
)
def test_planted_mistakes_are_noticed(
    monkeypatch: pytest.MonkeyPatch, broken: str, steps: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(CoordinatorRuntime, broken, lambda *_: None)
    if broken == "_close":
        monkeypatch.setattr(CoordinatorRuntime, "_on_timer", lambda *_: None)
    with pytest.raises(AssertionError, match="never answered"):
        run(steps)
