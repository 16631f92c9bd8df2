"""Stock clients, unchanged, side by side: each writes with every codec, reads what every other wrote, shares groups,
keeps its place over a restart and administers topics, records and groups.

A client is a process behind an adapter (`clients/`); one that is not installed is skipped with the reason. What a
client cannot do by itself is said in `clients/known.py`. `make compat` runs the same on Apache Kafka, and on three
Tidelog nodes that are one cluster.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.compatibility.clients import table
from tests.compatibility.clients.client import Client, ClientFailed, Record
from tests.compatibility.clients.known import KINDS, reduced
from tests.compatibility.clients.places import PATIENCE_S, Place, await_that, open_place
from tests.compatibility.conftest import OPTIONS, SERVERS, WITH_KAFKA, start
from tests.compatibility.filling import CODECS
from tests.compatibility.wire import Wire
from tidelog.protocol.api import SERVED, api_name

PLACES = [*SERVERS, "cluster"] if WITH_KAFKA or os.environ.get("TIDELOG_COMPAT_CLUSTER") else SERVERS
NOW_MS = int(time.time() * 1000)
RECORDS = [
    Record(b"key", b"value" * 100, (("one", b"1"), ("one", b"11"), ("two", b"2")), NOW_MS),
    Record(None, b"no key", (), NOW_MS + 5),
    Record(b"tombstone", None, (), NOW_MS - 5000),
    Record(b"", b"", (("empty", b""),), NOW_MS),
    Record(b"\x01\xff", bytes(range(256)) * 80, (), NOW_MS + 1),
    Record(b"null in a header", b"", (("null", None),), NOW_MS + 2),
]
CODEC_BITS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def patiently(ask: Callable[[], Any]) -> Any:
    """An answer, once a broker that has just started can give it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except ClientFailed:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def able(*operations: str) -> list[str]:
    """The clients that can do all of these."""
    return [name for name, kind in KINDS.items() if not kind.lacks.keys() & set(operations)]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with open_place(request.param, tmp_path_factory.mktemp(request.param), OPTIONS, start) as opened:
        yield opened


# ------------------------------------------------------------------------------------------- records and their codecs


@pytest.fixture(scope="module")
def written(place: Place) -> dict[str, str]:
    """Client -> the topic it wrote; filled as clients are wanted."""
    return {}


def topic_of(place: Place, written: dict[str, str], writer: str) -> str:
    """Where a client wrote all records with every codec, one codec after the other."""
    client = place.client(writer)
    if writer not in written:
        topic = place.topic()
        for codec in codecs_of(writer):
            client.produce(topic, [reduced(record, KINDS[writer].loses) for record in RECORDS], codec)
        written[writer] = topic
    return written[writer]


def codecs_of(writer: str) -> list[str]:
    return [codec for codec in CODECS if codec not in KINDS[writer].lacks]


@pytest.mark.parametrize("reader", KINDS)
@pytest.mark.parametrize("writer", KINDS)
def test_every_client_reads_what_every_other_wrote(
    place: Place, written: dict[str, str], writer: str, reader: str
) -> None:
    topic = topic_of(place, written, writer)
    expected = [record for codec in codecs_of(writer) for record in RECORDS]
    found = place.client(reader).read(topic, len(expected))
    assert [record.offset for record in found] == list(range(len(expected)))
    lost = KINDS[writer].loses | KINDS[reader].loses
    assert [reduced(record, lost) for record in found] == [reduced(record, lost) for record in expected]
    if "timestamp" in KINDS[writer].loses and "timestamp" not in KINDS[reader].loses:
        latest_ms = time.time() * 1000 + 600_000  # kcat gives the time at which it writes
        assert all(NOW_MS - 600_000 < record.timestamp < latest_ms for record in found if record.timestamp)


@pytest.mark.parametrize("writer", KINDS)
def test_batches_are_kept_in_the_codec_they_were_written_with(
    place: Place, written: dict[str, str], writer: str
) -> None:
    topic = topic_of(place, written, writer)
    codecs = codecs_of(writer)
    found: dict[int, set[int]] = {}
    for offset, attributes in batches(place, topic):
        found.setdefault(offset // len(RECORDS), set()).add(attributes & 7)
    for number, codec in enumerate(codecs):
        # Clients leave a batch as it is that would not get smaller.
        assert {CODEC_BITS[codec]} <= found[number] <= {CODEC_BITS[codec], CODEC_BITS["none"]}, codec


def batches(place: Place, topic: str) -> Iterator[tuple[int, int]]:
    """(base offset, attributes) of every batch, as the leader gives them."""
    for node in place.nodes.values():
        with Wire(node.port) as wire:
            partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 24}
            topics = [{"topic": topic, "partitions": [partition]}]
            answer = wire.ask("fetch", 11, min_bytes=0, max_wait=0, max_bytes=1 << 24, topics=topics)
            data = bytes(answer.responses[0].partitions[0].records or b"")
        position = 0
        while position < len(data):
            offset, size = struct.unpack_from(">qi", data, position)
            yield offset, struct.unpack_from(">h", data, position + 21)[0]
            position += 12 + size


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("name", KINDS)
def test_every_level_of_acknowledgement(place: Place, name: str, acks: str) -> None:
    client, topic = place.client(name), place.topic()
    client.produce(topic, [Record(b"k", str(number).encode()) for number in range(20)], acks=acks)
    assert [record.value for record in client.read(topic, 20)] == [str(number).encode() for number in range(20)]


@pytest.mark.parametrize("name", able("idempotent"))
def test_an_idempotent_producer_is_told_the_offsets(place: Place, name: str) -> None:
    client, topic = place.client(name), place.topic()
    offsets = client.produce(topic, [Record(b"k", b"v")] * 10, idempotent=True)
    assert offsets == list(range(10))
    assert client.produce(topic, [Record(b"k", b"v")] * 2, idempotent=True) == [10, 11]


@pytest.mark.parametrize("name", KINDS)
def test_a_record_above_the_topics_limit_is_refused(place: Place, name: str) -> None:
    client, topic = place.client(name), place.topic(max_message_bytes="2000")
    with pytest.raises(ClientFailed, match=r"(?i)large|size"):
        client.produce(topic, [Record(b"k", os.urandom(5000))])
    client.produce(topic, [Record(b"k", b"small")])
    assert [record.value for record in client.read(topic, 1)] == [b"small"]


# -------------------------------------------------------------------------------------------------------------- groups


def settle(clients: dict[str, Client], partitions: int) -> None:
    """Until every partition has one owner among the members, and every member some."""

    assigned: dict[str, list[int]] = {}

    def settled() -> bool:
        assigned.update((member, client.ask("member", member=member)["assigned"]) for member, client in clients.items())
        owned = sorted(index for mine in assigned.values() for index in mine)
        return owned == list(range(partitions)) and all(assigned.values())

    await_that(settled, lambda: f"{partitions} partitions are shared like this: {assigned}")


def got(clients: dict[str, Client]) -> set[tuple[int, int]]:
    found = [client.ask("member", member=member)["got"] for member, client in clients.items()]
    return {(partition, offset) for one in found for partition, offset in one}


def share(place: Place, members: dict[str, Client], strategy: str) -> None:
    """Three members share six partitions; then one leaves and the others take over. Nothing is left unread."""
    topic, group = place.topic(partitions=6), f"group-{time.time_ns()}"
    writer = next(iter(members.values()))
    writer.produce(topic, [Record(b"k", b"v", partition=number % 6) for number in range(60)])
    try:
        for member, client in members.items():
            client.ask("join", member=member, group=group, topic=topic, strategy=strategy)
        settle(members, 6)
        first = {(index, offset) for index in range(6) for offset in range(10)}
        await_that(lambda: first <= got(members), "records that no member was given")
        left = next(iter(members))
        members.pop(left).ask("leave", member=left)
        settle(members, 6)
        writer.produce(topic, [Record(b"k", b"w", partition=number % 6) for number in range(60)])
        second = {(index, offset) for index in range(6) for offset in range(10, 20)}
        await_that(lambda: second <= got(members), "records that nobody took over")
    finally:
        for member, client in members.items():
            client.ask("leave", member=member)


@pytest.mark.parametrize(
    ("name", "strategy"), [(name, strategy) for name in able("join") for strategy in KINDS[name].strategies]
)
def test_a_group_of_three_rebalances_when_one_leaves(place: Place, name: str, strategy: str) -> None:
    client = place.client(name)
    share(place, {f"{name}-{strategy}-{number}": client for number in range(3)}, strategy)


@pytest.mark.hunt
def test_clients_of_every_kind_share_one_group(place: Place) -> None:
    """Six partitions for as many kinds as there are with the range assignor."""
    members = {}
    for name in able("join"):
        if "range" in KINDS[name].strategies:
            try:
                members[f"mixed-{name}"] = place.client(name)
            except pytest.skip.Exception:
                continue
    if len(members) < 2:
        pytest.skip("fewer than two kinds of clients are installed")
    share(place, members, "range")


@pytest.fixture(scope="module")
def committed_before_a_restart(place: Place, request: pytest.FixtureRequest) -> dict[str, tuple[str, str]]:
    """Client -> topic and group of an offset it committed, 4 of 10, before every broker was stopped and started.

    Only for the clients that are looked at afterwards in this run.
    """
    places: dict[str, tuple[str, str]] = {}
    chosen = {
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_committed_offsets_survive_a_restart"
    }
    for name in filter(chosen.__contains__, able("commit")):
        try:
            client = place.client(name)
        except pytest.skip.Exception:
            continue
        topic, group = place.topic(), f"committed-{name}"
        client.produce(topic, [Record(b"k", b"v")] * 10)
        client.ask("commit", group=group, topic=topic, offsets={0: 4})
        places[name] = topic, group
    place.restart()
    for name in places:
        if "create_topic" not in KINDS[name].lacks:
            # Its administrator was connected before, and may pause for seconds before it tries again.
            patiently(partial(place.client(name).ask, "topics"))
    return places


@pytest.mark.parametrize("name", able("commit"))
def test_committed_offsets_survive_a_restart(
    place: Place, committed_before_a_restart: dict[str, tuple[str, str]], name: str
) -> None:
    client = place.client(name)
    topic, group = committed_before_a_restart[name]
    if "committed" not in KINDS[name].lacks:
        assert patiently(lambda: client.ask("committed", group=group, topic=topic, partitions=1)) == {"0": 4}
    member = f"again-{name}"
    client.ask("join", member=member, group=group, topic=topic, strategy=KINDS[name].strategies[0])
    try:
        await_that(lambda: len(got({member: client})) >= 6, "the member reads nothing")
        assert got({member: client}) == {(0, offset) for offset in range(4, 10)}
    finally:
        client.ask("leave", member=member)


# ------------------------------------------------------------------------------------------------------ administration


@pytest.mark.parametrize("name", able("create_topic"))
def test_topics_are_created_altered_and_deleted(place: Place, name: str) -> None:
    client, topic = place.client(name), f"by-{name}-{time.time_ns()}"
    client.ask("create_topic", topic=topic, partitions=2, replicas=place.replicas, configs={"retention.ms": "123456"})
    await_that(lambda: topic in client.ask("topics"), "the topic is not listed")
    assert client.ask("partitions", topic=topic) == 2
    assert client.ask("config", topic=topic, name="retention.ms") == "123456"
    assert client.ask("config", topic=topic, name="cleanup.policy") == "delete"
    with pytest.raises(ClientFailed, match=r"(?i)exists"):
        client.ask("create_topic", topic=topic, partitions=2, replicas=place.replicas, configs={})
    client.ask("set_config", topic=topic, name="retention.ms", value="654321")
    await_that(lambda: client.ask("config", topic=topic, name="retention.ms") == "654321", "the config stays as it was")
    client.ask("add_partitions", topic=topic, total=4)
    await_that(lambda: client.ask("partitions", topic=topic) == 4, "no partition was added")
    client.ask("delete_topic", topic=topic)
    await_that(lambda: topic not in client.ask("topics"), "the topic is still listed")


@pytest.mark.parametrize("name", able("set_config"))
def test_what_cannot_be_set_is_refused(place: Place, name: str) -> None:
    client, topic = place.client(name), place.topic()
    with pytest.raises(ClientFailed, match=r"(?i)invalid"):
        client.ask("set_config", topic=topic, name="retention.ms", value="never")


@pytest.mark.parametrize("name", able("brokers"))
def test_the_brokers_are_told(place: Place, name: str) -> None:
    assert place.client(name).ask("brokers") == len(place.nodes)


@pytest.mark.parametrize("name", able("end_offset"))
def test_offsets_are_listed(place: Place, name: str) -> None:
    client, topic = place.client(name), place.topic()
    client.produce(topic, [Record(b"k", b"v")] * 7)
    assert client.ask("start_offset", topic=topic) == 0
    assert client.ask("end_offset", topic=topic) == 7


@pytest.mark.parametrize("name", able("delete_records"))
def test_records_are_deleted(place: Place, name: str) -> None:
    client, topic = place.client(name), place.topic()
    client.produce(topic, [Record(b"k", b"v")] * 7)
    client.ask("delete_records", topic=topic, before=3)
    assert client.ask("start_offset", topic=topic) == 3
    assert client.ask("end_offset", topic=topic) == 7
    assert [record.offset for record in client.read(topic, 4)] == [3, 4, 5, 6]


@pytest.mark.parametrize("name", able("groups", "group"))
def test_groups_are_listed_and_described(place: Place, name: str) -> None:
    client, topic, group = place.client(name), place.topic(partitions=2), f"described-{name}"
    member = f"described-{name}"

    def described() -> tuple[str, int]:
        found = client.ask("group", group=group)
        return found["state"].lower(), found["members"]

    client.ask("join", member=member, group=group, topic=topic, strategy=KINDS[name].strategies[0])
    try:
        settle({member: client}, 2)
        assert group in client.ask("groups")
        # A client may join once more when it has its partitions, because it was told of them only then.
        await_that(lambda: described() == ("stable", 1), lambda: f"the group is described as {described()}")
    finally:
        client.ask("leave", member=member)
    await_that(lambda: described()[1] == 0, "the member stays")
    assert described()[0] in ("empty", "dead")


@pytest.mark.parametrize("name", able("group_offsets", "set_group_offset"))
def test_offsets_of_groups_are_set_and_told(place: Place, name: str) -> None:
    client, topic, group = place.client(name), place.topic(), f"offsets-{name}"
    client.produce(topic, [Record(b"k", b"v")] * 7)
    client.ask("commit", group=group, topic=topic, offsets={0: 5})
    assert client.ask("group_offsets", group=group) == {topic: {"0": 5}}
    client.ask("set_group_offset", group=group, topic=topic, offset=2)
    assert client.ask("group_offsets", group=group) == {topic: {"0": 2}}


@pytest.mark.parametrize("name", able("delete_group"))
def test_groups_are_deleted(place: Place, name: str) -> None:
    client, topic, group = place.client(name), place.topic(), f"deleted-{name}"
    client.ask("commit", group=group, topic=topic, offsets={0: 5})
    assert group in client.ask("groups")
    client.ask("delete_group", group=group)
    assert group not in client.ask("groups")


# ------------------------------------------------------------------------------------------------ what they asked for


@pytest.mark.parametrize("name", KINDS)
def test_what_a_client_asked_for_is_in_the_table(place: Place, name: str) -> None:
    """The last of the file: by now the client has done what it can. Kafka may be asked for more than is served."""
    place.client(name)
    versions = place.versions()
    if os.environ.get("TIDELOG_COMPAT_TABLE") == "write" and place.name == "tidelog":
        assert list(versions) == list(KINDS), "the table is made with all clients"
        table.write(table.rendered(versions, place.seen()))
    told_versions, told = table.told()
    if versions[name] != told_versions.get(name):
        pytest.skip(f"the table is of {name} {told_versions.get(name)}, this is {versions[name]}")
    asked = [
        f"{name} asks for {api_name(key)} {version}"
        for key, seen in place.seen().get(name, {}).items()
        for version in seen - told[name].get(key, set())
        if key in SERVED
    ]
    assert not asked, "make compat-table writes the table anew"
