"""Which logs are read before a reassignment removes replicas, in which order, and when that is confirmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import until
from tidelog.broker.replicas import removal_checks
from tidelog.broker.replicas.removal_checks import RemovalChecks
from tidelog.replication.controller.metadata.image import MetadataDelta

TOPIC_ID = b"t" * 16


class FakePartition:
    topic, topic_id, offline = "t", TOPIC_ID, False

    def __init__(self, index: int, size_bytes: int, confirmed: list[int]) -> None:
        self.index = index
        self.log = SimpleNamespace(size_bytes=size_bytes)
        self._confirmed = confirmed

    def confirm_reading(self) -> None:
        self._confirmed.append(self.index)


class World:
    """Partitions led by node 1, whose logs are read when `let_read` says so."""

    def __init__(self) -> None:
        self.partitions: dict[int, Any] = {}
        self.placed: dict[int, Any] = {}
        self.confirmed: list[int] = []
        self.read: list[int] = []
        self.damaged: set[int] = set()
        self.unreadable: set[int] = set()
        self.gates: dict[int, asyncio.Event] = {}
        self.checks = RemovalChecks(1, cast(Any, self), cast(Any, self), cast(Any, self), asyncio.get_running_loop())

    def assignment_of(self, partition: Any) -> Any:
        return self.placed[partition.index]

    def add(self, index: int, size_bytes: int = 0, **placed: Any) -> None:
        self.partitions[index] = FakePartition(index, size_bytes, self.confirmed)
        self.placed[index] = SimpleNamespace(
            **{
                "leader": 1, "replicas": (1, 2, 3), "isr": (1, 2, 3), "removing_replicas": (3,),
                "adding_replicas": (), "elr": (), **placed,
            }
        )  # fmt: skip

    def tell(self) -> None:
        self.checks.on_image(MetadataDelta(changed_partitions={TOPIC_ID: set(self.partitions)}))

    def find(self, topic_id: bytes, index: int) -> Any:
        return self.partitions.get(index)

    async def read_whole(self, partition: Any) -> bool:
        self.read.append(partition.index)
        if partition.index in self.gates:
            await self.gates[partition.index].wait()
        return partition.index not in self.unreadable

    def has_unsettled(self, partition: Any) -> bool:
        return partition.index in self.damaged

    def look_at(self, partition: Any) -> None:
        pass

    async def comes(self, *confirmed: int) -> None:
        await until(lambda: set(confirmed) <= set(self.confirmed))


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(removal_checks, "PAUSE_S", 0.01)
    found = World()
    yield found
    await found.checks.close()


async def test_the_smallest_log_is_read_first(world: World) -> None:
    for index, size_bytes in enumerate((300, 100, 200)):
        world.add(index, size_bytes)
    world.tell()
    await world.comes(0, 1, 2)
    assert world.read == [1, 2, 0]


async def test_a_repair_is_confirmed_while_another_log_is_read(world: World) -> None:
    world.add(0, 1)
    world.add(1, 1 << 40)
    world.damaged.add(0)
    world.gates[1] = asyncio.Event()
    world.tell()
    await until(lambda: world.read == [0, 1])
    assert world.confirmed == []
    world.damaged.clear()
    await world.comes(0)
    assert 1 not in world.confirmed
    world.gates[1].set()
    await world.comes(1)


@pytest.mark.parametrize(
    "placed",
    [
        {"removing_replicas": ()},
        {"adding_replicas": (2,)},
        {"leader": 2},
        {"removing_replicas": (1,)},
        {"isr": (1, 3)},
    ],
)
async def test_only_a_removal_that_waits_for_this_leader_is_looked_at(world: World, placed: dict[str, Any]) -> None:
    world.add(0, **placed)
    world.add(1)
    world.tell()
    await world.comes(1)
    assert world.read == [1]


async def test_a_log_that_could_not_be_read_is_read_again_unless_it_need_not_be(world: World) -> None:
    world.add(0)
    world.unreadable.add(0)
    world.tell()
    await until(lambda: len(world.read) > 2)
    assert world.confirmed == []
    world.unreadable.clear()
    await world.comes(0)
    world.placed[0].removing_replicas = ()
    await asyncio.sleep(0.05)
    world.confirmed.clear()
    await asyncio.sleep(0.05)
    assert world.confirmed == []


async def test_a_leader_that_is_alone_waits_only_for_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal_checks, "DEAD_REPLICAS_WAIT_S", 0.1)
    world.add(0, isr=(1, 2))
    world.add(1, isr=(1,), removing_replicas=(2, 3))
    world.add(2, isr=(1,), removing_replicas=(2, 3), elr=(2,))
    world.damaged.update((0, 1, 2))
    world.tell()
    await world.comes(1)
    assert set(world.confirmed) == {1}
