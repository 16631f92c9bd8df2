"""Arguments of a wrong type or value, for every argument of every public method: an error of the client's own words
that names the argument, before anything is sent.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidelog
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.reference_pages import _INTERNAL_METHODS, _INTERNAL_PARAMETERS
from tests.unit.client.test_producer import producer, values
from tidelog import (
    Admin,
    ConfigResource,
    Consumer,
    KafkaError,
    NewTopic,
    Producer,
    ProducerRecord,
    Replica,
    TopicPartition,
)
from tidelog.client import sync
from tidelog.client.network.cluster import Cluster
from tidelog.protocol.messages.produce import ProduceRequest

PACKAGE = Path(tidelog.__file__).parent
ENCODERS = PACKAGE / "protocol" / "codec"
T0 = TopicPartition("t", 0)
TOPIC = ConfigResource("topic", "t")
GOOD: dict[str, Any] = {
    "broker_id": 1,
    "broker_ids": [1],
    "changes": {},
    "coordinator_epoch": 0,
    "counts": {"t": 2},
    "directory_id": bytes(16),
    "endpoints": [("CONTROLLER", "127.0.0.1", 1)],
    "group": "g",
    "group_id": "g",
    "group_ids": ["g"],
    "levels": {"transaction.version": 2},
    "names": ["t"],
    "node_id": 1,
    "offset": 0,
    "offsets": {T0: 0},
    "partition": T0,
    "partitions": {T0: 0},
    "paths": {Replica("t", 0, 1): "/data"},
    "producer_epoch": 0,
    "producer_id": 1,
    "records": [b"v"],
    "replicas": [Replica("t", 0, 1)],
    "resources": [TOPIC],
    "table": pa.table({"value": [b"v"]}),
    "targets": {T0: [1]},
    "timestamps": {T0: 1},
    "topic": "t",
    "topics": [NewTopic("t")],
    "transactional_ids": ["id"],
}
GOOD_OF_PRODUCER = {"partition": 0}
wrong: Any = tidelog
WRONG: list[Any] = [
    5, -1, 2**31, 2**70, 1.5, float("nan"), True, None, object(), print, pa.table({"a": [1]}),
    "x", "", "\ud800", "y" * 40_000, b"x", {}, [], [[]], [None], [5], ["x"], ["\ud800"],
    {"x": 5}, {5: 5}, {"x": None}, {"x": [5]}, {"x": {"a": object()}}, {"x": {5: "x"}}, {("x",): {}},
    T0, [("t", "0")], [("t", True)], [("t", 2**40)], {T0: "x"}, {T0: None}, {T0: 1.5}, {T0: -5}, {T0: 2**70},
    {T0: [1, "x"]}, {T0: wrong.OffsetAndMetadata("5")}, {T0: wrong.OffsetAndMetadata(5, 5)},
    wrong.ConsumerGroupMetadata("g", "x"),
    ProducerRecord(b"v"), [("a", "b", "c")], [("CONTROLLER", "h", "x")], [("CONTROLLER", "h", 2**20)],
    wrong.NewTopic("x"), [wrong.NewTopic(5)], [wrong.NewTopic("x", "3")], [wrong.NewTopic("x", 2**40)],
    [wrong.NewTopic("x", 1, "1")],
    [wrong.NewTopic("x", configs=5)], [wrong.NewTopic("x", configs={5: 5})], [wrong.NewTopic("x", configs={"a": None})],
    [wrong.NewTopic("x", replica_assignments={0: 5})], [wrong.NewTopic("x", replica_assignments={"0": [1]})],
    [wrong.NewTopic("x", replica_assignments={0: ["1"]})], [wrong.NewTopic("x", replica_assignments=[[0]])],
    {wrong.Replica("t", 0, 1): 5}, {wrong.Replica("t", "0", 1): "/x"}, [wrong.Replica("t", 0, "1")],
    [wrong.Replica(5, 0, 1)],
    {TOPIC: 5}, {TOPIC: [5]}, {TOPIC: [wrong.ConfigChange("a", "5", 9)]}, {TOPIC: [wrong.ConfigChange(5, "5")]},
    {ConfigResource("zopic", "t"): []}, [ConfigResource("zopic", "t")], [ConfigResource("broker", "x")],
]  # fmt: skip


class Sent(Exception):
    """The client tried to connect: it has taken the arguments."""


def methods() -> Iterator[Any]:
    for client in (Admin, Consumer, Producer):
        for name, method in inspect.getmembers(client, inspect.isfunction):
            parameters = [each for each in inspect.signature(method).parameters if each not in _INTERNAL_PARAMETERS]
            if not name.startswith("_") and name not in _INTERNAL_METHODS and parameters:
                yield pytest.param(client, name, parameters, id=f"{client.__name__}.{name}")


def arguments(method: Any, parameter: str, value: Any, good: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call in which one is `value`, and the others that are needed are right."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for each in inspect.signature(method).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            positional = [value] if each.name == parameter else []
        elif each.name == parameter:
            named[each.name] = value
        elif each.default is each.empty and each.name not in _INTERNAL_PARAMETERS:
            named[each.name] = good[each.name]
    return positional, named


def is_in_own_words(error: BaseException) -> bool:
    """Whether a `raise` of the package made the error, and neither Python nor an encoder of requests."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = Path(trace.tb_frame.f_code.co_filename)
    is_ours = file.is_relative_to(PACKAGE) and not file.is_relative_to(ENCODERS)
    return is_ours and linecache.getline(str(file), trace.tb_lineno).strip().startswith("raise ")


async def refusal(calling: Any, name: str, positional: list[Any], named: dict[str, Any]) -> Exception | None:
    """The error of a call that refuses its arguments."""
    try:
        outcome = getattr(calling, name)(*positional, **named)
        if inspect.isawaitable(outcome):
            await outcome
    except (Sent, RuntimeError):  # RuntimeError: for a state, such as no assignment
        return None
    except Exception as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("client", "name", "parameters"), list(methods()))
async def test_a_wrong_argument_is_refused_in_words_that_name_it(
    client: Callable[..., Any], name: str, parameters: list[str], monkeypatch: pytest.MonkeyPatch
):
    async def start(cluster: Cluster) -> None:
        raise Sent

    monkeypatch.setattr(Cluster, "start", start)
    options = {"group_id": "g"} if client is Consumer else {}
    if name == "send_offsets_to_transaction":
        options["transactional_id"] = "id"
    good = GOOD | GOOD_OF_PRODUCER if client is Producer else GOOD
    for parameter in parameters:
        for value in WRONG:
            error = await refusal(client(**options), name, *arguments(getattr(client, name), parameter, value, good))
            if type(value) is object:
                assert isinstance(error, (TypeError, ValueError)), f"{parameter} takes any object"
                assert parameter in str(error) or parameter.removesuffix("s") in str(error)
            if error is not None:
                assert isinstance(error, (TypeError, ValueError, KafkaError))
                assert is_in_own_words(error), f"{parameter}={value!r}: {error!r}"
                assert "\n" not in str(error)
                assert len(str(error)) < 400, f"{parameter}: an error of {len(str(error))} characters"


@pytest.mark.parametrize(("client", "name", "parameters"), list(methods()))
def test_the_blocking_method_takes_the_same(client: type, name: str, parameters: list[str]):
    blocking = inspect.signature(getattr(getattr(sync, client.__name__), name)).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in blocking.values()):
        assert [each for each in blocking if each != "self"] == parameters


WRONG_CALLS: list[tuple[Callable[[], Any], Callable[[Any], Any], str]] = [
    (sync.Consumer, lambda it: it.commit([T0]), "offsets must be a dict of offsets by TopicPartition"),
    (sync.Admin, lambda it: it.create_partitions(["t"]), "counts must be a dict of numbers of partitions by topic"),
    (sync.Admin, lambda it: it.create_topics(NewTopic("x")), "topics must be a list of NewTopic, not NewTopic"),
    (
        sync.Admin,
        lambda it: it.create_topics([wrong.NewTopic("x", "3")]),
        "NewTopic.num_partitions must be a whole number",
    ),
    (sync.Admin, lambda it: it.create_topics([], timeout_ms="5"), "timeout_ms must be a whole number, not '5'"),
    (sync.Producer, lambda it: it.send_many("t", 5), "records must be a list or another iterable of records, not 5"),
    (sync.Producer, lambda it: it.send_batch("t", 5, partition=0), "records must be a list or another iterable"),
    (sync.Producer, lambda it: it.send_batch("t", [b"v"], partition=None), "partition must be a whole number"),
]


@pytest.mark.parametrize(("client", "call", "text"), WRONG_CALLS)
def test_the_blocking_clients_refuse_the_same(client: Callable[[], Any], call: Callable[[Any], Any], text: str):
    with closing(client()) as calling, pytest.raises(TypeError, match=text):
        call(calling)


@pytest.mark.parametrize(("partitions", "factor"), [(2, -1), (-1, 1)])
def test_replica_assignments_leave_no_number_to_be_given(partitions: int, factor: int):
    with closing(sync.Admin()) as admin, pytest.raises(ValueError, match="gives the numbers"):
        admin.create_topics([NewTopic("x", partitions, factor, replica_assignments={0: [1]})])


@pytest.mark.parametrize("client", [Producer, Consumer, Admin, sync.Producer, sync.Consumer, sync.Admin])
def test_options_without_names_are_refused_with_the_form_that_a_client_takes(client: Any):
    """confluent-kafka takes a dict in the first place."""
    with pytest.raises(TypeError, match=r"named options, as .*\*\*options\), not .*'bootstrap.servers'"):
        client({"bootstrap.servers": "127.0.0.1:9092"})


async def test_a_single_record_is_not_taken_for_many():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        for single in (b"abc", "abc", ProducerRecord(b"v", b"k"), {b"k": b"v"}):
            with pytest.raises(TypeError, match="records must be a list or another iterable of records"):
                await sending.send_many("t", single)
            with pytest.raises(TypeError, match="records must be a list or another iterable of records"):
                await sending.send_batch("t", single, partition=0)
        await sending.flush()
        assert not cluster.sent(ProduceRequest)


async def test_a_close_with_a_wrong_timeout_closes_nothing():
    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        with pytest.raises(TypeError, match="timeout_ms must be a number of milliseconds, not 'soon'"):
            await sending.close("soon")  # type: ignore[arg-type]
        await sending.send_and_wait("t", b"v")
        assert values(cluster) == [b"v"]


async def test_a_serializer_that_returns_something_else_is_named():
    async with FakeCluster(t=1) as cluster, producer(cluster, value_serializer=str) as sending:
        with pytest.raises(TypeError, match="value_serializer must return bytes or None, not str"):
            await sending.send("t", 5)


async def test_an_integer_of_another_library_is_a_number():
    class Number:
        def __index__(self) -> int:
            return 0

    async with FakeCluster(t=1) as cluster, producer(cluster) as sending:
        await sending.send_and_wait("t", b"v", partition=Number(), timestamp_ms=Number())  # type: ignore[arg-type]
        assert values(cluster) == [b"v"]
