"""Odd group requests to Tidelog and to Kafka 4.3 alike: the classic protocol, static members, offsets, coordinators."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.side_by_side import Brokers, Each

NewTopic = Callable[..., str]
NO_SUCH_ID = uuid.UUID(int=77)
BY_ID_FROM = 10
PROTOCOLS = [{"name": "range", "metadata": b"m1"}, {"name": "sticky", "metadata": b"m2"}]
ANOTHER = [{"name": "zzz", "metadata": b""}]
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def coordinated(running_brokers: Brokers) -> None:
    """Both have a coordinator for every partition of `__consumer_offsets`, and producer ids to give."""
    brokers = running_brokers
    brokers.reconnect()
    brokers.get("find_coordinator", 3, key="g", key_type=0)
    questions: list[tuple[str, int, dict[str, Any]]] = [
        ("offset_fetch", 5, {"group_id": f"g{number}", "topics": None}) for number in range(20)
    ]
    questions.append(("init_producer_id", 0, {"transactional_id": None, "transaction_timeout": 1000}))
    for api, version, values in questions:
        for _ in range(200):
            answers = brokers.get(api, version, **values)
            if all(int(answer.error_code) == 0 for answer in answers):
                break
            time.sleep(0.1)


@pytest.fixture
def group(brokers: Brokers, coordinated: None) -> str:
    return f"group-{next(_numbers)}"


def join(brokers: Brokers, version: int, group: str, member: Any = "", **values: Any) -> Each:
    asked = {"session_timeout": 6000, "member_id": member, "protocol_type": "consumer", "protocols": PROTOCOLS}
    if version >= 1:
        asked["rebalance_timeout"] = 6000
    return brokers.same("join_group", version, **{"group_id": group, **asked, **values})


def member_of(brokers: Brokers, group: str, **values: Any) -> Each:
    """The id of a new member, the only one of its group, in generation 1 of a group that has none yet."""
    answers = join(brokers, 9, group, **values)
    if answers[0].error_code.name == "member_id_required":
        answers = join(brokers, 9, group, answers.of("member_id"), **values)
    return answers.of("member_id")


def sync(brokers: Brokers, version: int, group: str, generation: int, member: Any, **values: Any) -> None:
    named = {"protocol_type": "consumer", "protocol_name": "range"} if version >= 5 else {}
    asked = {"group_id": group, "generation_id": generation, "member_id": member, "assignments": []}
    brokers.same("sync_group", version, **{**asked, **named, **values})


def assigned(member: Any, assignment: bytes = b"A") -> list[dict[str, Any]]:
    return [{"member_id": member, "assignment": assignment}, {"member_id": "stranger", "assignment": b"B"}]


# Name: (since version, what is said).
JOINS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (0, {}),
    "no protocols": (0, {"protocols": []}),
    "nameless protocol": (0, {"protocols": [{"name": "", "metadata": b""}]}),
    "no type": (0, {"protocol_type": ""}),
    "another type": (0, {"protocol_type": "connect"}),
    "session 0": (0, {"session_timeout": 0}),
    "session -1": (0, {"session_timeout": -1}),
    "session too short": (0, {"session_timeout": 999}),
    "session too long": (0, {"session_timeout": 2**31 - 1}),
    "unknown member": (0, {"member_id": "nobody"}),
    "no group": (0, {"group_id": ""}),
    "odd group": (0, {"group_id": "a b/é"}),
    "rebalance -1": (1, {"rebalance_timeout": -1}),
    "static": (5, {"group_instance_id": "i1"}),
    "static, nameless": (5, {"group_instance_id": ""}),
    "static, odd": (5, {"group_instance_id": "a b"}),
    "static, dot": (5, {"group_instance_id": "."}),
    "static, long": (5, {"group_instance_id": "x" * 300}),
    "static, unknown": (5, {"group_instance_id": "i1", "member_id": "nobody"}),
    "long reason": (8, {"reason": "r" * 300}),
}


@pytest.mark.parametrize("version", range(10))
@pytest.mark.parametrize("name", JOINS)
def test_a_member_joins(brokers: Brokers, group: str, name: str, version: int) -> None:
    since, said = JOINS[name]
    if version < since:
        return
    values = dict(said)
    name_of_group = values.pop("group_id", group)
    if name_of_group:
        name_of_group += f"-{version}"
    answers = join(brokers, version, name_of_group, **values)
    if answers[0].error_code.name == "member_id_required":
        join(brokers, version, name_of_group, answers.of("member_id"), **values)


def test_what_a_group_has_in_common(brokers: Brokers, group: str) -> None:
    member = member_of(brokers, group)
    others: list[dict[str, Any]] = [{"protocol_type": "connect"}, {"protocols": ANOTHER}, {"protocols": []}]
    for said in others:
        for version in range(10):
            join(brokers, version, group, **said)
    join(brokers, 9, group, member, protocols=ANOTHER)


@pytest.mark.parametrize("version", range(6))
def test_members_sync(brokers: Brokers, group: str, version: int) -> None:
    sync(brokers, version, group, 1, "nobody")
    sync(brokers, version, "", 1, "nobody")
    member = member_of(brokers, group)
    sync(brokers, version, group, 1, "nobody")
    for generation in (0, 2, -1):
        sync(brokers, version, group, generation, member)
    if version >= 3:
        sync(brokers, version, group, 1, member, group_instance_id="none")
    if version >= 5:
        sync(brokers, version, group, 1, member, protocol_type="another")
        sync(brokers, version, group, 1, member, protocol_name="sticky")
        sync(brokers, version, group, 1, member, protocol_name=None, protocol_type=None)
    sync(brokers, version, group, 1, member, assignments=assigned(member))
    sync(brokers, version, group, 1, member, assignments=assigned(member, b"C"))


@pytest.mark.parametrize("version", range(5))
def test_hearts_beat(brokers: Brokers, group: str, version: int) -> None:
    def beat(generation: int, member: Any, of: str = group, **values: Any) -> None:
        brokers.same("heartbeat", version, group_id=of, generation_id=generation, member_id=member, **values)

    beat(1, "nobody")
    beat(1, "nobody", of="")
    beat(-1, "")
    member = member_of(brokers, group)
    for generation, who in ((1, member), (1, "nobody"), (0, member), (2, member), (-1, member), (1, "")):
        beat(generation, who)
    sync(brokers, 3, group, 1, member, assignments=assigned(member))
    beat(1, member)
    beat(2, member)
    if version >= 3:
        beat(1, member, group_instance_id="none")


@pytest.mark.parametrize("version", range(6))
def test_members_leave(brokers: Brokers, group: str, version: int) -> None:
    def leave(*members: Any, of: str = group) -> None:
        if version < 3:
            brokers.same("leave_group", version, group_id=of, member_id=members[0])
        else:
            named = [one if isinstance(one, dict) else {"member_id": one} for one in members]
            brokers.same("leave_group", version, group_id=of, members=named)

    leave("nobody")
    leave("nobody", of="")
    leave("")
    if version >= 3:
        leave()
        leave("a", "b", "a")
        leave({"member_id": "", "group_instance_id": "none"})
    member = member_of(brokers, group)
    leave("nobody")
    if version >= 3:
        leave("nobody", member, member)
    leave(member)
    leave(member)
    member = member_of(brokers, group, group_instance_id="i1")
    if version >= 3:
        for member_id, instance in (("nobody", "i1"), ("", "none"), ("", "i1"), (member, "i1")):
            leave({"member_id": member_id, "group_instance_id": instance})


def test_a_static_member_comes_back(brokers: Brokers, group: str) -> None:
    static = {"group_instance_id": "i1"}
    first = member_of(brokers, group, **static)
    sync(brokers, 5, group, 1, first, assignments=assigned(first), **static)
    second = join(brokers, 7, group, **static).of("member_id")
    for member in (first, second):
        brokers.same("heartbeat", 3, group_id=group, generation_id=1, member_id=member, **static)
    sync(brokers, 5, group, 1, second, **static)
    join(brokers, 7, group, first, **static)
    join(brokers, 9, group, **static)
    join(brokers, 5, group, second, group_instance_id="i2")
    for protocols in ([PROTOCOLS[0]], [PROTOCOLS[1]]):
        join(brokers, 5, group, protocols=protocols, **static)


def at(index: int = 0, offset: int = 5, **values: Any) -> dict[str, Any]:
    return {"partition_index": index, "committed_offset": offset, "committed_metadata": "m", **values}


class Offsets:
    """Commits and fetches of one version, whose topics have names or ids."""

    def __init__(self, brokers: Brokers, version: int, group: str, topic: str) -> None:
        self.brokers, self.version, self.group, self.topic = brokers, version, group, topic
        self.topic_id = brokers.topic_id(topic)

    def named(self, topic: str) -> dict[str, Any]:
        if self.version < BY_ID_FROM:
            return {"name": topic}
        return {"topic_id": self.topic_id if topic == self.topic else NO_SUCH_ID if topic else None}

    def commit(
        self, *partitions: dict[str, Any], topics: dict[str, list[Any]] | None = None, generation: int = -1,
        member: Any = "", of: str | None = None, **values: Any,
    ) -> None:  # fmt: skip
        wanted = {self.topic: list(partitions)} if topics is None else topics
        self.brokers.same(
            "offset_commit", self.version, group_id=self.group if of is None else of, member_id=member,
            generation_id_or_member_epoch=generation,
            topics=[{**self.named(name), "partitions": found} for name, found in wanted.items()], **values,
        )  # fmt: skip

    def fetch(self, of: str, *topics: tuple[str, list[int]], everything: bool = False, **values: Any) -> None:
        asked = [{**self.named(name), "partition_indexes": indexes} for name, indexes in topics]
        wanted = None if everything else asked
        if self.version < 8:
            self.brokers.same("offset_fetch", self.version, group_id=of, topics=wanted, **values)
        else:
            groups = [{"group_id": of, "topics": wanted}]
            self.brokers.same("offset_fetch", self.version, groups=groups, **values)

    def fetch_all_ways(self) -> None:
        group, topic = self.group, self.topic
        for partitions in ([0, 1, 9], [0, 0], []):
            self.fetch(group, (topic, partitions))
        self.fetch(group, (topic, [0]), (topic, [1]))
        self.fetch(group)
        for name, index in (("nowhere", 0), ("", 0), (topic, -1)):
            self.fetch(group, (name, [index]))
        for unknown in ("nobody", ""):
            self.fetch(unknown, (topic, [0]))
        if self.version >= 2:
            for one in (group, "nobody", ""):
                self.fetch(one, everything=True)
        if self.version >= 7:
            self.fetch(group, (topic, [0]), require_stable=True)
        if self.version >= 8:
            whole = {"group_id": group, "topics": None}
            self.brokers.same("offset_fetch", self.version, groups=[])
            self.brokers.same("offset_fetch", self.version, groups=[whole, whole, {**whole, "group_id": "nobody"}])
        if self.version >= 9:
            for member, epoch in (("x", 1), ("", 0), ("x", -1), (None, -1), (None, 5)):
                said = {"group_id": group, "member_id": member, "member_epoch": epoch, "topics": None}
                self.brokers.same("offset_fetch", self.version, groups=[said])


@pytest.mark.parametrize("version", range(2, 11))
def test_offsets_are_committed(brokers: Brokers, group: str, topic_in_both: NewTopic, version: int) -> None:
    offsets = Offsets(brokers, version, group, topic_in_both(2))
    topic = offsets.topic
    offsets.commit(at())
    offsets.commit()
    offsets.commit(topics={})
    offsets.commit(topics={topic: [at(7), at(1)], "nowhere": [at()]})
    for unknown in ("nowhere", ""):
        offsets.commit(topics={unknown: [at()]})
    for partitions in ([at(0), at(0, 9)], [at(-1)], [at(0, -1)], [at(0, -5)], [at(0, 2**63 - 1)]):
        offsets.commit(*partitions)
    for metadata in (None, "x" * 4096, "x" * 4097):
        offsets.commit(at(committed_metadata=metadata), at(1))
    for generation, member, of in ((-1, "", ""), (5, "", None), (-2, "", None), (-1, "x", None), (5, "x", "unseen")):
        offsets.commit(at(), generation=generation, member=member, of=of)
    if version >= 6:
        offsets.commit(at(committed_leader_epoch=5), at(1, committed_leader_epoch=-7))
    if version >= 7:
        offsets.commit(at(), group_instance_id="none")
    offsets.fetch_all_ways()


@pytest.mark.parametrize("version", range(2, 11))
def test_members_commit(brokers: Brokers, group: str, topic_in_both: NewTopic, version: int) -> None:
    offsets = Offsets(brokers, version, group, topic_in_both())
    member = member_of(brokers, group)
    who = [(-1, ""), (1, member), (2, member), (1, "nobody"), (1, ""), (-1, member), (0, member)]
    for generation, one in who:
        offsets.commit(at(), generation=generation, member=one)
    sync(brokers, 3, group, 1, member, assignments=assigned(member))
    for generation, one in who:
        offsets.commit(at(0, 77), generation=generation, member=one)
    some_unknown = {offsets.topic: [at(7), at()], "nowhere": [at()]}
    wanted: list[dict[str, list[Any]]] = [{}, {"nowhere": []}, {"nowhere": [at()]}, some_unknown]
    for topics in wanted:
        offsets.commit(topics=topics, generation=9, member=member)
        offsets.commit(topics=topics, of="")
    if version >= 7:
        for one in (member, ""):
            offsets.commit(at(), generation=1, member=one, group_instance_id="none")
    offsets.fetch_all_ways()


@pytest.mark.parametrize("version", range(2, 5))
@pytest.mark.parametrize("retention_time", [-1, 0, -5, 1000])
def test_a_commit_says_how_long_it_is_kept(
    brokers: Brokers, group: str, topic_in_both: NewTopic, version: int, retention_time: int
) -> None:
    offsets = Offsets(brokers, version, group, topic_in_both())
    offsets.commit(at(), retention_time=retention_time)
    offsets.fetch(group, everything=True)


@pytest.mark.parametrize("version", range(1, 11))
def test_offsets_are_fetched(brokers: Brokers, group: str, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both(2)
    Offsets(brokers, version, group, topic).fetch_all_ways()
    Offsets(brokers, 8, group, topic).commit(at(0, 5, committed_leader_epoch=3), at(1, 6, committed_metadata=None))
    Offsets(brokers, version, group, topic).fetch_all_ways()


@pytest.mark.parametrize("version", range(7))
def test_coordinators_are_found(brokers: Brokers, group: str, version: int) -> None:
    brokers.ignored = frozenset({"error_message"})
    for key_type in (0, 2, 3, -1) if version else (0,):
        kind = {"key_type": key_type} if version else {}
        if version < 4:
            for key in ("g", "", "x" * 300):
                brokers.same("find_coordinator", version, key=key, **kind)
        else:
            for keys in ([], ["g"], ["g", "g"], ["", "h"]):
                brokers.same("find_coordinator", version, coordinator_keys=keys, **kind)


@pytest.mark.parametrize("version", range(6))
def test_producer_ids_are_given(brokers: Brokers, group: str, version: int) -> None:
    brokers.ignored = frozenset({"producer_id"})
    for timeout in (1000, 0, -1, 2**31 - 1):
        brokers.same("init_producer_id", version, transactional_id=None, transaction_timeout=timeout)
    brokers.same("init_producer_id", version, transactional_id="", transaction_timeout=1000)
    for producer_id, epoch in ((5, 0), (5, -1), (-1, 3), (-2, -2), (5, -2), (3000, 7)) if version >= 3 else ():
        was = {"producer_id": producer_id, "producer_epoch": epoch}
        brokers.same("init_producer_id", version, transactional_id=None, transaction_timeout=1000, **was)
