"""Topics, producers and connections come and go: what a node keeps of them does not grow with their number."""

from __future__ import annotations

import gc
import logging
from collections import Counter, deque

import pytest

from tests.simulation import world
from tests.simulation.cluster_clients import OPTIONS
from tests.simulation.stage import TOPIC, Stage, stage
from tidelog.client.admin.client import Admin
from tidelog.client.model import NewTopic
from tidelog.client.producing.producer import Producer
from tidelog.storage.log import directory

CONTAINERS = (dict, set, list, deque, bytearray)
# Bounded by time: a producer id is kept for producer.id.expiration.ms, a day.
BOUNDED = (
    "storage.producers.producer_state.ProducerState.entries",
    "storage.producers.producer_state.ProducerEntry.batches",
    "storage.producers.transitions.Transitions._changes",
)
ROOMS = ("tidelog.broker.", "tidelog.replication.", "tidelog.storage.")
WARM_ROUNDS, ROUNDS = 15, 25


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(world, "EVENTS_MAX", 10_000_000)
    monkeypatch.setattr(directory, "REMOVED_LOGS_MAX", 5)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def sizes() -> Counter[str]:
    """The number of items in the containers of the nodes' objects, by class and attribute."""
    gc.collect()
    found: Counter[str] = Counter()
    for each in gc.get_objects():
        kind = type(each)
        module = getattr(kind, "__module__", "")
        if not isinstance(module, str) or not module.startswith(ROOMS):
            continue
        slots = [name for base in kind.__mro__ for name in [*getattr(base, "__slots__", ())]]
        for name in {*slots, *getattr(each, "__dict__", {})}:
            try:
                value = getattr(each, name)
            except Exception:
                continue
            if isinstance(value, CONTAINERS):
                found[f"{module.removeprefix('tidelog.')}.{kind.__qualname__}.{name}"] += len(value)
    return found


def come_and_go(play: Stage, number: int) -> None:
    """A topic with a name and settings of its own, written by a producer of its own."""
    topic, servers = f"tmp_topic.{number}", play.cluster.layout.bootstrap

    async def work() -> None:
        async with Admin(**OPTIONS, bootstrap_servers=servers) as admin:
            placed = NewTopic(
                topic, replica_assignments={0: [1, 2, 3], 1: [2, 3, 1]}, configs={"retention.ms": f"{10**6 + number}"}
            )
            await admin.create_topics([placed])
            options = {**OPTIONS, "client_id": f"client-{number}"}
            producer = Producer(**options, bootstrap_servers=servers, acks="all")
            try:
                for name, partition in ((topic, 0), (topic, 1), (TOPIC, 0)):
                    await producer.send_and_wait(name, b"v", partition=partition)
            finally:
                await producer.close(0)
            await admin.delete_topics([topic])

    play.do(work)
    play.wait(5)


@pytest.mark.slow
def test_what_is_gone_leaves_nothing():
    with stage() as play:
        play.world.on_step = None  # what checks each step remembers replicas that are gone
        play.up()
        for number in range(WARM_ROUNDS):
            come_and_go(play, number)
        before = sizes()
        for number in range(ROUNDS):
            come_and_go(play, WARM_ROUNDS + number)
        after = sizes()
        grown = {name: size - before[name] for name, size in after.items() if size - before[name] >= ROUNDS}
        assert {name: growth for name, growth in grown.items() if name not in BOUNDED} == {}
