from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from random import Random
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.unit.broker.coordinators.fakes import FakePorts, Reply, World
from tidelog.broker.coordinators import runtime as runtime_module
from tidelog.broker.coordinators.group.service import (
    HASHED_CHARACTERS_MAX,
    GroupCoordinatorService,
    abs_of_int32,
    java_hash,
    partition_of_id,
)
from tidelog.broker.coordinators.loading import NOT_READY, STEP_DONE, LargeSections, replay_log
from tidelog.broker.coordinators.outcome import Now, Outcome
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.service import TransactionCoordinatorService
from tidelog.protocol.batches.compression import LZ4
from tidelog.protocol.batches.records import (
    ControlRecordType,
    decode_batch,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

E = ErrorCode


class Tape:
    """A coordinator that remembers what is done to it; a record is its own bytes."""

    def __init__(self) -> None:
        self.replayed: list[tuple[int, bytes, int]] = []
        self.ended: list[tuple[int, bool]] = []
        self.events: list[tuple] = []
        self.deadline_ms: int | None = None
        self.broken_at_ms = -1
        self.writes_when_committed: list[bytes] = []
        self.is_closed = False

    def encode(self, record: bytes) -> tuple[bytes, bytes | None]:
        if record == b"unencodable":
            raise ValueError
        return record, b"value"

    def decode(self, key: bytes, value: bytes | None) -> bytes | None:
        return None if key == b"unknown" else key

    def replay(self, offset: int, record: bytes, producer_id: int) -> None:
        assert record != b"broken" or self.events, "breaks while loading"
        self.replayed.append((offset, record, producer_id))

    def replay_end_transaction(self, producer_id: int, committed: bool, count_max: int) -> int:
        self.ended.append((producer_id, committed))
        return 0

    def restore_some(self, now: Now) -> bool:
        return False

    def on_loaded(self, now: Now) -> Outcome:
        self.events.append(("loaded",))
        return Outcome(now)

    def close(self) -> None:
        self.is_closed = True

    def on_committed(self, context: object, now: Now) -> Outcome:
        self.events.append(("committed", context, len(self.replayed)))
        outcome = Outcome(now)
        if self.writes_when_committed:
            outcome.write([self.writes_when_committed.pop(0)])
        return outcome

    def on_failed(self, context: object, error: ErrorCode, in_log: bool, now: Now) -> Outcome:
        self.events.append(("late" if in_log else "failed", context, error))
        return Outcome(now)

    def next_deadline_ms(self) -> int | None:
        return self.deadline_ms

    def on_deadline(self, now: Now) -> Outcome:
        if now.steady_ms == self.broken_at_ms:
            self.deadline_ms = now.steady_ms + 50
            raise ZeroDivisionError
        if self.deadline_ms is not None and self.deadline_ms <= now.steady_ms:
            self.events.append(("deadline", now.steady_ms))
            self.deadline_ms = None
        return Outcome(now)


class Bench:
    def __init__(self, commits_at_once: bool = True) -> None:
        self.ports = FakePorts(commits_at_once)
        self.tapes: list[Tape] = []
        self.runtime: CoordinatorRuntime[Tape] = CoordinatorRuntime(
            "test", self.ports, self._create, write_timeout_ms=1000
        )

    def _create(self, partition: int) -> Tape:
        self.tapes.append(Tape())
        return self.tapes[-1]

    def elect(self, epoch: int = 1) -> Tape:
        self.runtime.on_elected(0, epoch)
        self.ports.advance(0)
        return self.tapes[-1]

    def write(self, *records: bytes, context: object = None) -> Reply:
        def operation(tape: Tape, token: int, now: Now) -> Outcome:
            outcome = Outcome(now)
            outcome.reply_when_stored(list(records), token, "stored")
            outcome.writes[0].context = context
            return outcome

        return Reply(lambda: self.runtime.submit(0, operation))


def test_a_write_is_replayed_before_it_is_answered():
    bench = Bench(commits_at_once=False)
    tape = bench.elect()
    first, second = bench.write(b"a", b"b", context=1), bench.write(b"c", context=2)
    assert (tape.replayed, first.response) == ([], None)
    bench.ports.commit(0, 2)
    assert tape.replayed == [(0, b"a", -1), (1, b"b", -1)]
    assert (first.response, second.response) == ("stored", None)
    bench.ports.commit(0)
    assert tape.replayed[2:] == [(2, b"c", -1)]
    assert tape.events == [("loaded",), ("committed", 1, 2), ("committed", 2, 3)]


def test_an_answer_that_fails_does_not_end_what_a_write_has_begun():
    """The answer may serve the next request of its connection at once."""
    bench = Bench(commits_at_once=False)
    tape = bench.elect()
    tape.writes_when_committed = [b"next"]

    def operation(tape: Tape, token: int, now: Now) -> Outcome:
        outcome = Outcome(now)
        outcome.reply_when_stored([b"first"], token, "stored")
        outcome.writes[0].context = 1
        return outcome

    waiting: Any = bench.runtime.submit(0, operation)

    def fail(response: Any) -> None:
        raise ZeroDivisionError

    waiting.on_complete(fail)
    with contextlib.suppress(ZeroDivisionError):
        bench.ports.commit(0)
    bench.ports.commit(0)
    assert [record for _, record, _ in tape.replayed] == [b"first", b"next"]


def test_a_node_alone_answers_in_the_same_call():
    bench = Bench()
    bench.elect()
    assert bench.runtime.submit(0, _stored) == "stored"


def _count(tape: Tape, token: int, now: Now) -> Outcome:
    outcome = Outcome(now)
    outcome.reply(token, [len(tape.replayed)])
    return outcome


def _stored(tape: Tape, token: int, now: Now) -> Outcome:
    outcome = Outcome(now)
    outcome.reply_when_stored([b"r"], token, "stored")
    return outcome


def test_a_refused_append_refuses_the_request_and_changes_nothing():
    bench = Bench()
    tape = bench.elect()
    bench.ports.refuse_appends = KafkaError(E.NOT_ENOUGH_REPLICAS)
    assert bench.write(b"a", context=1).error == E.COORDINATOR_NOT_AVAILABLE
    assert tape.events[-1] == ("failed", 1, E.COORDINATOR_NOT_AVAILABLE)
    bench.ports.refuse_appends = None
    assert bench.write(b"unencodable").error == E.INVALID_REQUEST
    assert tape.replayed == []


def test_a_late_commit_is_replayed_but_not_answered_twice():
    bench = Bench(commits_at_once=False)
    tape = bench.elect()
    reply = bench.write(b"a", context=1)
    bench.ports.advance(1000)
    assert reply.error == E.COORDINATOR_NOT_AVAILABLE
    bench.ports.commit(0)
    assert tape.replayed == [(0, b"a", -1)]
    assert tape.events == [("loaded",), ("late", 1, E.COORDINATOR_NOT_AVAILABLE), ("committed", 1, 1)]


def test_reads_after_what_is_under_way():
    bench = Bench(commits_at_once=False)
    bench.elect()
    bench.write(b"a")
    later = Reply(lambda: bench.runtime.submit(0, _count, after_pending_writes=True))
    assert later.is_parked
    bench.ports.commit(0)
    assert later.response == [1]
    assert bench.runtime.submit(0, _count, after_pending_writes=True) == [1]


def test_who_is_not_served_here():
    bench = Bench()
    assert bench.write(b"a").error == E.NOT_COORDINATOR
    bench.runtime.on_elected(0, 1)
    assert bench.write(b"a").error == E.COORDINATOR_LOAD_IN_PROGRESS
    assert bench.runtime.is_loading()
    bench.ports.advance(0)
    assert not bench.runtime.is_loading()
    assert bench.write(b"a").response == "stored"
    bench.runtime.on_resigned(0)
    assert bench.write(b"a").error == E.NOT_COORDINATOR


def test_resigning_answers_everybody_and_a_late_commit_finds_nobody():
    bench = Bench(commits_at_once=False)
    tape = bench.elect()
    reply = bench.write(b"a")
    bench.runtime.on_resigned(0)
    assert reply.error == E.NOT_COORDINATOR
    bench.ports.commit(0)
    assert tape.replayed == []
    tape.deadline_ms = 0
    bench.ports.advance(10_000)
    assert tape.events == [("loaded",)]


def test_a_new_epoch_loads_again_and_an_old_one_is_ignored():
    bench = Bench()
    bench.elect(epoch=5)
    bench.write(b"a")
    assert bench.elect(epoch=5).replayed == [(0, b"a", -1)]
    assert len(bench.tapes) == 1
    assert bench.elect(epoch=6).replayed == [(0, b"a", -1)]
    assert len(bench.tapes) == 2


@pytest.mark.parametrize("code", [E.NOT_LEADER_OR_FOLLOWER, E.KAFKA_STORAGE_ERROR])
@pytest.mark.parametrize(
    ("is_loaded", "text", "level"), [(True, "lost its log", "WARNING"), (False, "cannot be loaded", "ERROR")]
)
def test_a_log_that_another_broker_leads_now_is_no_reason_for_a_warning(
    caplog: pytest.LogCaptureFixture, code: ErrorCode, is_loaded: bool, text: str, level: str
) -> None:
    caplog.set_level("INFO", "tidelog")
    bench = Bench(commits_at_once=False)
    bench.elect()
    bench.write(b"a")
    if not is_loaded:
        bench.elect(epoch=2)
    caplog.clear()
    bench.ports.lose(0, KafkaError(code))
    expected = "INFO" if code is E.NOT_LEADER_OR_FOLLOWER else level
    assert [(one.levelname, text in one.message) for one in caplog.records] == [(expected, True)]
    assert bench.write(b"b").error == E.NOT_COORDINATOR


def test_a_lost_log_ends_the_service_until_the_next_election():
    bench = Bench(commits_at_once=False)
    bench.elect()
    replies = [bench.write(b"a"), bench.write(b"b")]
    bench.ports.lose(0, KafkaError(E.NOT_LEADER_OR_FOLLOWER))
    assert [reply.error for reply in replies] == [E.NOT_COORDINATOR] * 2
    assert bench.write(b"c").error == E.NOT_COORDINATOR
    bench.ports.commits_at_once = True
    bench.ports.commit(0)
    assert len(bench.elect(epoch=1).replayed) == 2


def test_loading_waits_until_the_log_is_committed():
    bench = Bench(commits_at_once=False)
    bench.elect()
    bench.write(b"a")
    tape = bench.elect(epoch=2)
    assert bench.write(b"b").error == E.COORDINATOR_LOAD_IN_PROGRESS
    bench.ports.commit(0)
    assert tape.events == [("loaded",)]
    assert bench.write(b"b").is_parked


def test_a_log_that_cannot_be_read_is_not_served():
    bench = Bench()
    bench.ports.logs[0] = [bytearray(b"\0" * 16 + b"\1" + b"\0" * 60)]
    bench.elect()
    assert bench.write(b"a").error == E.NOT_COORDINATOR


def test_loading_lets_the_loop_breathe():
    tape = Tape()
    batch = memoryview(encode_batch([(0, b"%d" % number, b"", ()) for number in range(2500)]))
    steps = list(replay_log(tape, [batch, batch]))
    assert steps == [STEP_DONE] * 10 + [2500]
    assert len(tape.replayed) == 5000


def test_loading_large_records_lets_the_loop_breathe_more_often():
    """Groups with hundreds of members: 500 of their records took the loop for a third of a second and more."""
    tape = Tape()
    batch = memoryview(encode_batch([(0, b"%d" % number, bytes(50_000), ()) for number in range(100)]))
    assert list(replay_log(tape, [batch])) == [STEP_DONE] * 20 + [100]
    assert len(tape.replayed) == 100


def test_loading_decodes_the_records_of_a_batch_step_by_step():
    """Five million empty records, compressed to a few KB, took 7 s and 1.2 GB in one turn of the loop."""
    tape = Tape()
    batch = encode_batch([(0, b"%d" % number, b"", ()) for number in range(2500)])
    batch[-1] = 1  # the last record announces a header that it has not
    with pytest.raises(KafkaError, match="INVALID_RECORD"):
        list(replay_log(tape, [memoryview(batch)]))
    assert len(tape.replayed) == 2000


def test_a_batch_that_is_malformed_at_its_end_is_not_served():
    bench = Bench()
    batch = encode_batch([(0, b"%d" % number, b"", ()) for number in range(2500)])
    batch[-1] = 1
    bench.ports.logs[0] = [batch]
    bench.elect()
    bench.ports.advance(100)
    assert bench.write(b"a").error == E.NOT_COORDINATOR


class SlowThread:
    """Decompresses when it is let go."""

    def __init__(self) -> None:
        self.is_done = False
        self.count = 0

    def on_thread(self, work: Callable[[], bytes]) -> Callable[[], bytes | None]:
        self.count += 1
        return lambda: work() if self.is_done else None


def large_batch(records: int = 700) -> memoryview:
    return memoryview(
        encode_batch([(0, b"%d" % number, bytes(2000), ()) for number in range(records)], compression=LZ4)
    )


def test_a_large_batch_is_decompressed_on_a_thread_and_replayed_in_its_place():
    tape, thread = Tape(), SlowThread()
    small = memoryview(encode_batch([(0, b"small", b"", ())], compression=LZ4))
    after = memoryview(encode_batch([(0, b"after", b"", ())], base_offset=701))
    steps = replay_log(tape, [small, large_batch(), after], large_sections=LargeSections(thread.on_thread))
    assert [next(steps), next(steps)] == [NOT_READY] * 2
    assert ([record for _, record, _ in tape.replayed], thread.count) == ([b"small"], 1)
    thread.is_done = True
    assert [step for step in steps if step != STEP_DONE] == [702]
    assert [record for _, record, _ in tape.replayed] == [b"small", *[b"%d" % n for n in range(700)], b"after"]


def test_one_load_at_a_time_has_a_large_batch_and_one_that_is_given_up_lets_it_go():
    thread = SlowThread()
    sections = LargeSections(thread.on_thread)
    tapes = [Tape(), Tape()]
    first, second = (replay_log(tape, [large_batch()], large_sections=sections) for tape in tapes)
    assert (next(first), next(second), thread.count) == (NOT_READY, NOT_READY, 1)
    del first
    thread.is_done = True
    assert [step for step in second if step != STEP_DONE] == [700]
    assert ([len(tape.replayed) for tape in tapes], thread.count, sections.is_held) == ([0, 700], 2, False)


def test_a_partition_that_moves_away_during_the_decompression_leaves_the_thread_to_its_next_load(
    monkeypatch: pytest.MonkeyPatch,
):
    bench, thread = Bench(), SlowThread()
    monkeypatch.setattr(bench.runtime, "_large_sections", LargeSections(thread.on_thread))
    bench.ports.logs[0] = [bytearray(large_batch())]
    bench.ports.commit(0, 700)
    for epoch in (1, 2, 3):
        bench.runtime.on_resigned(0)
        tape = bench.elect(epoch)
        bench.ports.advance(100)
    assert bench.write(b"a").error == E.COORDINATOR_LOAD_IN_PROGRESS
    thread.is_done = True
    bench.ports.advance(100)
    assert (len(tape.replayed), [len(each.replayed) for each in bench.tapes]) == (700, [0, 0, 700])
    assert tape.events == [("loaded",)]


def test_loading_follows_transactions_and_passes_over_what_it_does_not_know():
    tape = Tape()
    plain = encode_batch([(0, b"unknown", None, ()), (0, b"plain", None, ()), (0, None, b"no key", ())])
    inside = encode_batch(
        [(0, b"inside", b"", ())], base_offset=3, producer_id=9, producer_epoch=0, base_sequence=0, transactional=True
    )
    value = encode_end_txn_value(0)
    marker = encode_control_batch(
        ControlRecordType.COMMIT, value, timestamp=0, base_offset=4, producer_id=9, producer_epoch=0
    )
    (*_, end_offset) = replay_log(tape, [memoryview(plain), memoryview(inside), memoryview(marker)])
    assert tape.replayed == [(1, b"plain", -1), (3, b"inside", 9)]
    assert (tape.ended, end_offset) == ([(9, True)], 5)


def test_deadlines_are_met_with_one_timer():
    bench = Bench()
    tape = bench.elect()
    start = bench.ports.now_ms()
    tape.deadline_ms = start + 500
    bench.write(b"a")
    tape.deadline_ms = start + 200
    bench.write(b"b")
    bench.ports.advance(199)
    assert tape.events[-1][0] != "deadline"
    bench.ports.advance(1)
    assert tape.events[-1] == ("deadline", start + 200)


def test_too_much_under_way_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime_module, "PENDING_WRITES_MAX", 3)
    bench = Bench(commits_at_once=False)
    bench.elect()
    replies = [bench.write(b"a") for _ in range(4)]
    assert replies[3].error == E.COORDINATOR_NOT_AVAILABLE
    bench.ports.commit(0)
    assert [reply.response for reply in replies[:3]] == ["stored"] * 3
    assert bench.write(b"a").is_parked


def test_parked_requests_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime_module, "PARKED_REQUESTS_MAX", 2)
    world = World()
    joins = [world.join(group=f"g{number}", version=3) for number in range(3)]
    assert joins[2].error == E.COORDINATOR_NOT_AVAILABLE
    world.advance(3000)
    assert [join.error for join in joins[:2]] == [0, 0]
    assert world.join(group="again", version=3).is_parked


def test_heartbeats_are_served_while_other_groups_fill_the_bounds(monkeypatch: pytest.MonkeyPatch):
    """Else a load would cost quiet members their sessions, and end in a storm of rebalances."""
    world = World()
    (member,) = world.stable("quiet", session_ms=10_000)
    monkeypatch.setattr(runtime_module, "PARKED_REQUESTS_MAX", 0)
    for _ in range(6):
        world.advance(5_000)
        assert world.heartbeat("quiet", member).error == E.NONE
    assert world.committed("quiet") == -1
    assert world.join(group="loud", version=3).error == E.COORDINATOR_NOT_AVAILABLE
    assert world.commit("quiet", member=member, generation=1).error == E.COORDINATOR_NOT_AVAILABLE


def test_a_heartbeat_is_welcome_while_the_partition_loads():
    world = World()
    world.stable()
    world.service.on_partition_elected(0, 9)
    assert world.heartbeat(member="anybody").error == E.NONE
    assert world.join().error == E.COORDINATOR_LOAD_IN_PROGRESS
    assert world.commit().error == E.COORDINATOR_LOAD_IN_PROGRESS


def test_a_restart_keeps_members_and_offsets():
    world = World(partitions=5)
    members = {group: world.stable(group, size=2, session_ms=300_000) for group in ("a", "b", "c")}
    for group, (leader, _) in members.items():
        world.commit(group, {("t", 0): len(group)}, member=leader, generation=1)
    world.restart()
    for group, (leader, follower) in members.items():
        assert world.heartbeat(group, leader).error == world.heartbeat(group, follower).error == 0
        assert world.sync(group, follower).response.assignment == follower.encode()
        assert world.committed(group) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("flights", -771814909),
        ("日本", 835047),
        ("🛫", 1773134),
        ("polygenelubricants", -(2**31)),
    ],
)
def test_groups_are_spread_as_java_hashes_them(text: str, expected: int):
    assert java_hash(text) == expected


@pytest.mark.parametrize("length", [1, 2, 3, 17, 36, 101, 127, 128, 129, 1_000, 1_025, HASHED_CHARACTERS_MAX])
@pytest.mark.parametrize("characters", ["a", "\uffff", "az \u65e5\ud800\U0001f6eb"])
def test_ids_of_any_length_are_hashed_as_java_does(length: int, characters: str):
    text = "".join(Random(length).choices(characters, k=length))
    expected = 0
    for high, low in struct.iter_unpack("BB", text.encode("utf-16-be", "surrogatepass")):
        expected = (31 * expected + (high << 8 | low)) & 0xFFFFFFFF
    assert java_hash(text) & 0xFFFFFFFF == expected


def test_the_partition_of_a_group():
    service = GroupCoordinatorService(World().config, FakePorts(), World().rng, lambda: 50, lambda: True)
    assert service.partition_for("polygenelubricants") == 0
    assert service.partition_for("flights") == 771814909 % 50
    assert abs_of_int32(-5) == 5


def test_the_partition_of_an_id_that_no_record_can_hold_costs_no_more_than_that_of_the_longest():
    """The hash of an id of 100 MB would hold up the node for a minute."""
    longest = "a" * HASHED_CHARACTERS_MAX
    assert partition_of_id(longest, 1 << 31) == abs_of_int32(java_hash(longest)) != partition_of_id("a", 1 << 31)
    assert partition_of_id(longest + "b" * 9, 1 << 31) == partition_of_id(longest, 1 << 31)
    groups = GroupCoordinatorService(World().config, FakePorts(), World().rng, lambda: 1 << 31, lambda: True)
    assert groups.partition_for(longest + "b") == groups.partition_for(longest)
    ports, unused = FakePorts(), MagicMock()
    config = TransactionCoordinatorConfig()
    transactions = TransactionCoordinatorService(config, ports, unused, lambda: 1 << 31, lambda: 2, unused)
    assert transactions.partition_for(longest + "b") == transactions.partition_for(longest)


def test_markers_are_what_the_loader_takes_them_for():
    assert (ControlRecordType.ABORT, ControlRecordType.COMMIT) == (0, 1)


def test_a_wall_clock_that_jumps_expires_nobody():
    world = World()
    (member,) = world.stable()
    world.ports.wall_ahead_ms += 3_600_000
    world.advance(1000)
    assert world.heartbeat(member=member).error == E.NONE
    world.ports.wall_ahead_ms -= 7_200_000
    world.advance(10_000)
    assert world.heartbeat(member=member).error == E.UNKNOWN_MEMBER_ID


def test_an_append_that_commits_earlier_ones_does_not_mix_up_the_order():
    bench = Bench(commits_at_once=False)
    tape = bench.elect()
    tape.writes_when_committed = [b"nested 1", b"nested 2"]
    first = bench.write(b"first", context=1)
    bench.ports.commits_on_append = True
    second = bench.write(b"second", context=2)
    assert first.response == "stored"
    bench.ports.commits_at_once = True
    third = bench.write(b"third")
    bench.ports.commit(0)
    assert (second.response, third.response) == ("stored", "stored")
    logged = [record.key for batch in bench.ports.logs[0] for record in decode_batch(batch)]
    assert [record for _, record, _ in tape.replayed] == logged


def test_a_failure_in_one_deadline_does_not_stop_the_clock():
    bench = Bench()
    tape = bench.elect()
    start = bench.ports.now_ms()
    tape.deadline_ms = start + 100
    bench.write(b"a")
    tape.broken_at_ms = start + 100
    with pytest.raises(ZeroDivisionError):
        bench.ports.advance(100)
    bench.ports.advance(100)
    assert tape.events[-1] == ("deadline", start + 150)


def test_a_coordinator_that_breaks_while_loading_is_not_served():
    bench = Bench()
    bench.elect()
    bench.write(b"broken")
    bench.elect(epoch=2)
    assert bench.write(b"a").error == E.NOT_COORDINATOR
