"""What a broker claims of its logs when it registers: a claim outlives starts that come to nothing, and no loss."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.test_node import fetch, fetched, produce
from tidelog.broker.cluster.lifecycle import BrokerLifecycle, RegistrationRefused
from tidelog.broker.replicas.discovered_logs import DiscoveredLogs
from tidelog.protocol.errors import ConfigError
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.files.incarnation import INCARNATION_FILE, write_incarnation
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.segments.log_config import LogConfig
from tidelog.testing.ports import free_port

MakeBatch = Callable[..., bytes]


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epochs that brokers have spoken for, in the order of their registrations."""
    made: list[int] = []
    register = BrokerLifecycle.register

    async def note(self: BrokerLifecycle, previous_epoch: int) -> int:
        made.append(previous_epoch)
        return await register(self, previous_epoch)

    monkeypatch.setattr(BrokerLifecycle, "register", note)
    return made


async def start_in_vain(start_node: Any, monkeypatch: pytest.MonkeyPatch, **config: str) -> None:
    """The logs are opened, and the process is stopped before any controller has taken it in."""

    async def refuse(self: BrokerLifecycle, previous_epoch: int) -> int:
        raise RegistrationRefused("not now")

    with monkeypatch.context() as patch:
        patch.setattr(BrokerLifecycle, "register", refuse)
        with pytest.raises(ConfigError, match="not now"):
            await start_node(**config)


def copy_as_killed(data: Path, killed: Path) -> None:
    """What a kill at this moment would leave. A copy of the incarnation does not count, so another is written."""
    shutil.copytree(data, killed)
    content = json.loads((data / INCARNATION_FILE).read_bytes())
    write_incarnation(OsDisk(), str(killed), content["brokerEpoch"], content["bootId"])


async def write(running: Any, batch: bytes, count: int = 20) -> int:
    """Its broker epoch."""
    wire = await running.connect()
    await wire.create_topic("t")
    for _ in range(count):
        await wire.call(produce("t", batch), 9, ProduceResponse)
    epoch: int = running.node._broker.lifecycle.epoch
    return epoch


async def test_a_loss_is_not_forgotten_by_a_clean_stop_before_the_registration(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, claims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_node()
    await write(running, make_batch(b"x" * 100))
    await running.stop()
    data = tmp_path / "data"
    path = data / "t-0" / f"{0:020d}.log"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        (data / name).unlink()
    (data / "t-0" / f"{0:020d}.index").write_bytes(b"no index")
    await start_in_vain(start_node, monkeypatch)
    assert path.stat().st_size < len(content), "a record that was acknowledged is cut"
    await start_node()
    assert claims[1:] == [-1]


@pytest.mark.slow
async def test_a_claim_outlives_a_start_that_came_to_nothing(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, claims: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a clean stop, and after a kill: the process wrote nothing, and found all that was there."""
    running = await start_node()
    epoch = await write(running, make_batch(b"x"))
    data, killed = tmp_path / "data", tmp_path / "killed"
    copy_as_killed(data, killed)
    await running.stop()
    await start_in_vain(start_node, monkeypatch)
    second = await start_node()
    assert claims[1:] == [epoch]
    await second.stop()
    for _ in range(2):
        await start_in_vain(start_node, monkeypatch, **{"log.dirs": str(killed)})
    await start_node(**{"log.dirs": str(killed)})
    assert claims[2:] == [epoch]


@pytest.mark.slow
async def test_one_of_several_directories_that_was_copied_back_ends_the_claim(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, claims: list[int]
) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    both = {"log.dirs": f"{first},{second}"}
    running = await start_node(**both)
    await write(running, make_batch(b"x"))
    await running.stop()
    shutil.copytree(second, tmp_path / "old")
    running = await start_node(**both)
    epoch = running.node._broker.lifecycle.epoch
    await running.stop()
    running = await start_node(**both)
    assert claims[2] == epoch, "both are of the same stop"
    await running.stop()
    shutil.rmtree(second)
    shutil.copytree(tmp_path / "old", second)
    await start_node(**both)
    assert claims[3] == -1


def test_a_copy_on_its_way_to_another_directory_is_not_the_replica() -> None:
    key, topic_id = ("t", 0), b"t" * 16
    here = SimpleNamespace(directory_id=b"a" * 16, futures={})
    there = SimpleNamespace(directory_id=b"b" * 16, futures={key: SimpleNamespace(topic_id=topic_id)})
    discovered = DiscoveredLogs([here, there])  # type: ignore[arg-type]
    assert not discovered.has(key, topic_id, here.directory_id), "it may lack anything"
    assert discovered.has(key, topic_id, there.directory_id), "the metadata says that it has taken over"


class Refusing:
    """A log directory that refuses changes, and the directories of its node. Its topic ids have no checksum."""

    def __init__(self, count: int) -> None:
        self.directory_id, self.tries, self.has_failed = b"a" * 16, 0, False
        log = SimpleNamespace(topic_id=b"t" * 16, topic_id_has_checksum=False, flush_due=False)
        self.found = {("t", index): log for index in range(count)}
        self.offline: dict[tuple[str, int], str] = {}
        self.vanished: set[tuple[str, int]] = set()

    def __iter__(self) -> Iterator[Refusing]:
        return iter([self])

    def load(self, config_for: object, now_ms: int) -> dict[tuple[str, int], SimpleNamespace]:
        return self.found

    def refuse(self, *_: object) -> None:
        self.tries += 1
        raise OSError(errno.EIO, "simulated")

    set_topic_id = set_aside = refuse

    def forget_vanished(self, keys: object) -> None:
        pass

    def failed(self, directory: Refusing, error: OSError) -> None:
        self.has_failed = True

    def is_usable(self, directory: Refusing) -> bool:
        return not self.has_failed


@pytest.mark.parametrize("is_claimed", [True, False])
def test_a_directory_that_refuses_the_claim_of_one_log_is_not_tried_for_each_other(is_claimed: bool) -> None:
    """Each try may wait for the device, with the whole node."""
    refusing = Refusing(20)
    discovered = DiscoveredLogs(refusing)  # type: ignore[arg-type]
    discovered.load(lambda topic: LogConfig(), 0)
    for key in refusing.found:
        if is_claimed:
            assert discovered.claim(key, b"t" * 16, refusing.directory_id) is not None
        else:
            discovered.set_others_aside(key, b"u" * 16)
    assert refusing.tries == 1


async def test_a_controller_that_was_killed_knows_damage_at_the_end_of_its_log(start_node: Any, tmp_path: Path) -> None:
    """The machine ran on, so that no tail is torn: a voter that cut it in silence would vote without the record."""
    port = free_port()
    config = {
        "process.roles": "controller", "node.id": "1", "controller.quorum.voters": f"1@127.0.0.1:{port}",
        "listeners": f"CONTROLLER://127.0.0.1:{port}", "controller.listener.names": "CONTROLLER",
    }  # fmt: skip
    LogDirectory.open(OsDisk(), str(tmp_path / "data"), node_id=1, cluster_id="A" * 22).close()
    running = await start_node(**config)
    killed = tmp_path / "killed"
    log = running.node._metadata.raft.log
    await until(lambda: log.acknowledged_end is not None and log.acknowledged_end.end_offset == log.end_offset > 0)
    copy_as_killed(tmp_path / "data", killed)
    await running.stop()
    [path] = (killed / "__cluster_metadata-0").glob("*.log")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptLog, match="no other voter has a copy"):
        await start_node(**config, **{"log.dirs": str(killed)})


@pytest.mark.slow
async def test_a_shortage_at_a_claim_does_not_set_the_log_aside(
    start_node: Any, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partition.metadata of Kafka gets its checksum at the claim, which needs a descriptor. The claim is repeated."""
    running = await start_node()
    await write(running, make_batch(b"acknowledged"), 1)
    await running.stop()
    data = tmp_path / "data"
    file = data / "t-0" / "partition.metadata"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    shutil.copytree(data / "t-0", data / "gone-0")  # a log that the metadata does not assign
    set_topic_id, shortages = LogDirectory.set_topic_id, [errno.EMFILE]

    def set_when_possible(self: LogDirectory, topic: str, partition: int, topic_id: bytes) -> None:
        if shortages:
            number = shortages.pop()
            raise OSError(number, os.strerror(number))
        set_topic_id(self, topic, partition, topic_id)

    monkeypatch.setattr(LogDirectory, "set_topic_id", set_when_possible)
    running = await start_node()
    assert not shortages
    await until(lambda: running.node._broker.partitions.find("t", 0) is not None)
    wire = await running.connect()
    assert fetched(await wire.call(fetch("t"), 9, FetchResponse)) == [b"acknowledged"]
    stray = [path.name.partition(".")[0] for path in data.iterdir() if path.name.endswith("-stray")]
    assert stray == ["gone-0"]
