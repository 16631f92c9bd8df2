"""A node that finds damage in its own files: what it may claim when it registers, and what it serves meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker.conftest import RunningNode
from tests.unit.broker.test_node import fetch, fetched, produce, produced
from tidelog.broker.replicas.repairs import REPAIR_COMMITTED_REPLICA_ID, REPAIR_REPLICA_ID
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.produce import ProduceResponse

MakeBatch = Callable[..., bytes]
StartNode = Callable[..., Coroutine[Any, Any, RunningNode]]


async def filled(running: RunningNode, tmp_path: Path, make_batch: MakeBatch, count: int = 10) -> Path:
    """A topic `t` of one partition with `count` batches of one record; where its log is."""
    wire = await running.connect()
    await wire.create_topic("t")
    for number in range(count):
        answer = await wire.call(produce("t", make_batch(b"%d" % number)), 8, ProduceResponse)
        assert produced(answer) == [(0, number)]
    [folder] = tmp_path.rglob("t-0")  # noqa: ASYNC240
    return folder


def claimed(running: RunningNode) -> int:
    """The epoch for which the node may speak: it has just registered with it."""
    return running.node._directories.clean_epoch("any boot")


async def test_a_whole_log_speaks_for_what_it_had(start_node: StartNode, tmp_path: Path, make_batch: MakeBatch) -> None:
    running = await start_node()
    await filled(running, tmp_path, make_batch)
    await running.stop()
    assert claimed(await start_node()) >= 0


@pytest.mark.parametrize("what", ["tail cut", "directory gone", "id of another topic"])
async def test_who_lost_records_speaks_for_nothing(
    start_node: StartNode, tmp_path: Path, make_batch: MakeBatch, what: str
) -> None:
    running = await start_node()
    folder = await filled(running, tmp_path, make_batch)
    await running.stop()
    log = folder / f"{0:020d}.log"
    if what == "tail cut":
        log.write_bytes(log.read_bytes()[:-5])
    elif what == "directory gone":
        shutil.rmtree(folder)
    else:
        (folder / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAABA")
    assert claimed(await start_node()) == -1
    if what == "id of another topic":
        assert list(folder.parent.glob("t-0.*-stray")), "its records are kept"


async def test_damaged_records_of_a_node_alone_are_an_error_and_the_others_are_served(
    start_node: StartNode, tmp_path: Path, make_batch: MakeBatch
) -> None:
    running = await start_node()
    folder = await filled(running, tmp_path, make_batch)
    await running.stop()
    log = folder / f"{0:020d}.log"
    data = bytearray(log.read_bytes())
    position, header = list(iter_headers(bytes(data)))[4]
    data[position + header.size_bytes - 2] ^= 1
    log.write_bytes(data)
    running = await start_node()
    wire = await running.connect()
    values, offset, errors = [], 0, []
    while offset < 10:
        answer = await wire.call(fetch("t", offset=offset), 11, FetchResponse)
        partition = answer.responses[0].partitions[0]
        if partition.error_code == ErrorCode.KAFKA_STORAGE_ERROR:
            continue  # until it is known that no other replica can be asked
        if partition.error_code:
            errors.append((offset, ErrorCode(partition.error_code).name))
            offset += 1
            continue
        found = fetched(answer)
        values += found
        offset += len(found)
    assert errors == [(4, "CORRUPT_MESSAGE")]
    assert values == [b"%d" % number for number in range(10) if number != 4]
    answer = await wire.call(produce("t", make_batch(b"on")), 8, ProduceResponse)
    assert produced(answer) == [(0, 10)], "writing goes on"


@pytest.mark.parametrize("replica_id", [REPAIR_REPLICA_ID, REPAIR_COMMITTED_REPLICA_ID])
async def test_a_replica_that_repairs_its_log_learns_at_once_that_a_copy_is_damaged_here_too(
    start_node: StartNode, tmp_path: Path, make_batch: MakeBatch, replica_id: int
) -> None:
    """Else two replicas that are damaged in the same place would wait for each other for ever."""
    running = await start_node()
    folder = await filled(running, tmp_path, make_batch)
    await running.stop()
    log = folder / f"{0:020d}.log"
    data = bytearray(log.read_bytes())
    position, header = list(iter_headers(bytes(data)))[4]
    data[position + header.size_bytes - 2] ^= 1
    log.write_bytes(data)
    running = await start_node()
    wire = await running.connect()
    # The node alone concludes in time that its damage is for good. It waits for others here, as if it were not alone.
    assert running.node._broker is not None
    running.node._broker.repairs._is_closed = True
    answer = await wire.call(fetch("t", offset=4), 11, FetchResponse)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR
    answer = await wire.call(fetch("t", offset=4, replica_id=replica_id), 11, FetchResponse)
    assert answer.responses[0].partitions[0].error_code == ErrorCode.CORRUPT_MESSAGE
