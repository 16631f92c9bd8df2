"""Real nodes on small file systems that fill up: what was acknowledged is there when there is room again.

Needs to mount a tmpfs, so it is skipped where nobody may (containers without CAP_SYS_ADMIN, users).
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import NewCluster
from tests.patience import PATIENCE_S
from tidelog.client import Admin, Consumer, NewTopic, Producer, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.testing.processes import TidelogProcess

pytestmark = pytest.mark.slow

VALUE = b"v" * 20_000
SIZE_MB = 4


def run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


class Volume:
    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        run("mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(path))

    def grow(self) -> None:
        run("mount", "-o", "remount,size=64m", str(self.path))

    def unmount(self) -> None:
        run("umount", "-l", str(self.path))


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[list[Volume]]:
    """Two of them."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            made.append(Volume(tmp_path / "volumes" / name))
            stack.callback(made[-1].unmount)
        yield made


async def send_until_refused(bootstrap: str, topic: str) -> tuple[list[int], ErrorCode]:
    """The numbers acknowledged, and why the next was not."""
    taken: list[int] = []
    producer = Producer(
        bootstrap_servers=bootstrap, acks="all", linger_ms=0, retries=0, enable_idempotence=False,
        request_timeout_ms=5_000, delivery_timeout_ms=6_000,
    )  # fmt: skip
    try:
        for number in range(1_000):
            await producer.send_and_wait(topic, b"%d:" % number + VALUE, partition=0)
            taken.append(number)
        pytest.fail("the volume does not fill up")
    except KafkaError as error:
        return taken, error.code
    finally:
        await producer.close(0)


async def read(bootstrap: str, topic: str) -> list[int]:
    async with Consumer(
        bootstrap_servers=bootstrap, auto_offset_reset="earliest", enable_auto_commit=False
    ) as consumer:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        found: list[int] = []
        async with asyncio.timeout(2 * PATIENCE_S):
            while await consumer.position(partition) < end:
                for records in (await consumer.poll(timeout_ms=500)).values():
                    found += [int((record.value or b"").partition(b":")[0]) for record in records]
        return found


async def create(bootstrap: str, *topics: NewTopic) -> None:
    async with Admin(bootstrap_servers=bootstrap) as admin:
        await admin.create_topics(list(topics))


def holder(volumes: list[Volume], topic: str) -> Volume:
    return next(volume for volume in volumes if (volume.path / f"{topic}-0").exists())


@pytest.mark.parametrize("flush", ["1", "9223372036854775807"])
def test_one_of_two_volumes_is_full(tmp_path: Path, volumes: list[Volume], flush: str) -> None:
    options = {
        "log.dirs": ",".join(str(volume.path) for volume in volumes),
        "metadata.log.dir": str(tmp_path / "metadata"),
        "log.flush.interval.messages": flush,
        "offsets.topic.num.partitions": "1",
    }
    with TidelogProcess(tmp_path / "node", options=options) as node:
        asyncio.run(create(node.bootstrap_servers, NewTopic("big", 1), NewTopic("small", 1)))
        assert holder(volumes, "big") is not holder(volumes, "small")
        taken, why = asyncio.run(send_until_refused(node.bootstrap_servers, "big"))
        assert why == ErrorCode.KAFKA_STORAGE_ERROR
        assert len(taken) > 100

        async def go_on() -> None:
            async with Producer(bootstrap_servers=node.bootstrap_servers) as producer:
                for number in range(20):
                    await producer.send_and_wait("small", b"%d:" % number, partition=0)

        asyncio.run(go_on())
        assert asyncio.run(read(node.bootstrap_servers, "small")) == list(range(20))
        node.kill()
        holder(volumes, "big").grow()
        node.start()
        found = asyncio.run(read(node.bootstrap_servers, "big"))
        assert found[: len(taken)] == taken
        assert asyncio.run(read(node.bootstrap_servers, "small")) == list(range(20))
    assert node.exit_code == 0, node.output_tail()


def test_a_node_whose_only_volume_is_full_ends_and_says_why(tmp_path: Path, volumes: list[Volume]) -> None:
    with TidelogProcess(tmp_path / "node", options={"log.dirs": str(volumes[0].path)}) as node:
        asyncio.run(create(node.bootstrap_servers, NewTopic("big", 1)))
        taken, _ = asyncio.run(send_until_refused(node.bootstrap_servers, "big"))
        deadline = time.monotonic() + 60
        while node.alive:
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.05)
        assert node.exit_code == 1
        assert "cannot go on without log directory" in node.output_tail()
        assert "No space left on device" in node.output_tail()
        volumes[0].grow()
        node.start()
        assert asyncio.run(read(node.bootstrap_servers, "big"))[: len(taken)] == taken


def test_others_lead_what_was_on_a_full_volume(new_cluster: NewCluster, tmp_path: Path, volumes: list[Volume]) -> None:
    cluster = new_cluster(3, options={"min.insync.replicas": "2"})
    node = cluster.nodes[1]
    node.stop()
    node.options["log.dirs"] = f"{node.options.get('log.dirs', node.data_directory)},{volumes[0].path}"
    node.options["metadata.log.dir"] = str(node.data_directory).partition(",")[0]
    node.start()
    names = [f"t{number}" for number in range(4)]
    topics = [NewTopic(name, replica_assignments={0: [1, 2, 3]}) for name in names]
    asyncio.run(create(cluster.bootstrap_servers, *topics))
    deadline = time.monotonic() + 60
    while not (there := [name for name in names if (volumes[0].path / f"{name}-0").exists()]):
        assert time.monotonic() < deadline, "no replica is on the volume"
        time.sleep(0.05)
    name = there[0]
    values = asyncio.run(_send_all(cluster.bootstrap_servers, name, 400))
    assert asyncio.run(read(cluster.bootstrap_servers, name)) == values
    deadline = time.monotonic() + PATIENCE_S
    while (leaders := asyncio.run(_leaders(cluster.bootstrap_servers, names)))[name] not in (2, 3):
        assert time.monotonic() < deadline, leaders
        time.sleep(0.05)
    assert any(leader == 1 for leader in leaders.values()), "the other directory serves on"


def test_a_full_volume_of_a_follower_holds_up_no_writes(
    new_cluster: NewCluster, tmp_path: Path, volumes: list[Volume]
) -> None:
    """They waited for its replicas until `replica.lag.time.max.ms` was over, though the controller had removed them."""
    cluster = new_cluster(3, options={"min.insync.replicas": "2", "replica.lag.time.max.ms": "60000"})
    node = cluster.nodes[2]
    node.stop()
    node.options["log.dirs"] = f"{node.options.get('log.dirs', node.data_directory)},{volumes[0].path}"
    node.options["metadata.log.dir"] = str(node.data_directory).partition(",")[0]
    node.start()
    partitions = range(12)
    placed = {number: [1 + (number + other) % 3 for other in range(3)] for number in partitions}
    asyncio.run(create(cluster.bootstrap_servers, NewTopic("t", replica_assignments=placed)))

    async def send_before_and_after() -> None:
        options = {"request_timeout_ms": 20_000, "delivery_timeout_ms": 30_000}
        async with Producer(bootstrap_servers=cluster.bootstrap_servers, **options) as producer:
            for number in partitions:
                await producer.send_and_wait("t", b"before", partition=number)
            (volumes[0].path / "other").write_bytes(bytes(shutil.disk_usage(volumes[0].path).free - 10_000))
            await asyncio.gather(*[await producer.send("t", VALUE, partition=number) for number in partitions])

    asyncio.run(send_before_and_after())
    assert "replicas in" in node.output_tail(), "its volume was not full"


async def _send_all(bootstrap: str, topic: str, count: int) -> list[int]:
    """As any client does: what is refused is sent again."""
    async with Producer(bootstrap_servers=bootstrap, acks="all", delivery_timeout_ms=60_000) as producer:
        for number in range(count):
            await producer.send_and_wait(topic, b"%d:" % number + VALUE, partition=0)
    return list(range(count))


async def _leaders(bootstrap: str, topics: list[str]) -> dict[str, int]:
    async with Admin(bootstrap_servers=bootstrap) as admin:
        described: Any = await admin.describe_topics(topics)
        found = described.values() if isinstance(described, dict) else described
        return {topic.name: topic.partitions[0].leader for topic in found}
