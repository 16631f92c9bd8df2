"""A second directory that was formatted as the first of a quorum: no second quorum of the cluster begins."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, stop_all, until
from tests.unit.replication.quorum.test_driver import same_mark
from tests.unit.replication.quorum.test_metadata_damage import SERVERS, committed, with_added_voters
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_quorum import DescribeQuorumRequest
from tidelog.replication.ports import Endpoint, PeerUnreachable
from tidelog.replication.quorum import driver
from tidelog.replication.quorum.driver import InconsistentVoters
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.replication.quorum.raft.snapshot import SnapshotId


async def _led_by_its_first(quorum: Quorum) -> Member:
    """The leader, formatted as the first of the quorum."""
    quorum.format_dynamic(1)
    first = await Member(quorum, 1, **SERVERS).start()
    await until(lambda: first.raft.is_leader)
    return first


def test_a_controller_formatted_as_the_first_begins_no_quorum_beside_another(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        await _led_by_its_first(quorum)
        quorum.format_dynamic(2)
        with pytest.raises(InconsistentVoters, match="without --standalone"):
            await Member(quorum, 2, **SERVERS).start()
        await stop_all(quorum)

    asyncio.run(run())


def test_of_two_that_begin_while_a_third_server_is_silent_only_one_begins_a_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second had asked the first before that had begun, and then waited for the silent one."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        quorum.format_dynamic(2)
        is_asked, is_over = asyncio.Event(), asyncio.Event()
        exchange = quorum.exchange

        async def silent_third(source: int, server: Endpoint, *args: Any, **kwargs: Any) -> Any:
            if (source, server) != (2, endpoint(3)):
                return await exchange(source, server, *args, **kwargs)
            is_asked.set()
            await is_over.wait()
            raise PeerUnreachable("no answer")

        monkeypatch.setattr(quorum, "exchange", silent_third)
        second = asyncio.create_task(Member(quorum, 2, **SERVERS).start())
        await asyncio.wait_for(is_asked.wait(), PATIENCE_S)
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.raft.is_leader)
        is_over.set()
        with pytest.raises(InconsistentVoters, match="without --standalone"):
            await asyncio.wait_for(second, PATIENCE_S)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_voter_that_lost_its_directory_and_is_formatted_as_the_first_again_follows_the_quorum(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        first = await with_added_voters(quorum)
        values = await committed(quorum, 3)
        await first.stop()
        shutil.rmtree(tmp_path / "1")
        quorum.format_dynamic(1)
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.listener.values == values)
        assert first.raft.voter_ids() == [1, 2, 3]
        await stop_all(quorum)

    asyncio.run(run())


def test_the_first_of_a_quorum_begins_it_where_the_others_wait_for_it_or_are_away(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        waiting = await Member(quorum, 2, **SERVERS).start()
        first = await _led_by_its_first(quorum)
        await until(partial(same_mark, waiting, first))
        await first.stop()
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.raft.is_leader)
        await stop_all(quorum)

    asyncio.run(run())


def test_another_quorum_begins_where_only_its_own_address_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        await _led_by_its_first(quorum)
        quorum.format_dynamic(2)
        second = await Member(quorum, 2, bootstrap_servers=[endpoint(2)]).start()
        await until(lambda: second.raft.is_leader)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_broker_that_meets_the_higher_epoch_of_another_quorum_leaves_with_one_line_and_cuts_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended with an AssertionError."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        first = await _led_by_its_first(quorum)
        broker = await Member(quorum, 3, can_vote=False, **SERVERS).start()
        values = await committed(quorum, 3)
        await until(partial(same_mark, broker, first))
        end_offset = broker.raft.log.end_offset
        await first.stop()
        quorum.format_dynamic(2)
        for _ in range(3):  # each start is another epoch
            second = await Member(quorum, 2, bootstrap_servers=[endpoint(2)]).start()
            await until(lambda: second.raft.is_leader)  # noqa: B023
            if second.raft.raft.epoch <= 2:
                await second.stop()
        await until(lambda: [each for each in broker.listener.told if each[0] == "failure"])
        assert broker.listener.values == values
        assert broker.raft.log.end_offset == end_offset
        await stop_all(quorum)

    with caplog.at_level("CRITICAL"):
        asyncio.run(run())
    [line] = [each for each in caplog.records if each.levelname == "CRITICAL"]
    assert "the controller at node:9002, which leads in epoch" in line.getMessage()
    assert "Stop it before this node starts again" in line.getMessage()
    assert not line.exc_info


def test_a_broker_installs_no_snapshot_of_another_quorum_that_ends_below_what_is_committed(tmp_path: Path) -> None:
    """Its metadata went back to that snapshot: it forgot the topics that were created since."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {}, segment_bytes=1 << 14)
        quorum.format_dynamic(2)
        alone: dict[str, Any] = {"bootstrap_servers": [endpoint(2)], "retention": MetadataRetention(bytes_max=1 << 14)}
        for _ in range(3):  # each start is another epoch
            second = await Member(quorum, 2, **alone).start()
            await until(lambda: second.raft.is_leader)  # noqa: B023
            last = second.raft.append([b"x" * 600], 0)
            if second.raft.raft.epoch < 3:
                await second.stop()
        for _ in range(50):
            last = second.raft.append([b"x" * 600], 0)
        await until(lambda: second.raft.high_watermark > last)
        for end_offset in (20, last, last + 1):
            identity = SnapshotId(end_offset, second.raft.raft.epoch)
            second.raft.write_snapshot([], identity, 7, 8)
            second.raft.snapshot_written(identity)
        assert second.raft.log.start_offset == last
        await second.stop()
        first = await _led_by_its_first(quorum)
        broker = await Member(quorum, 3, can_vote=False, **SERVERS).start()
        values = await committed(quorum, 200)
        await until(partial(same_mark, broker, first))
        end_offset = broker.raft.log.end_offset
        assert end_offset > last + 1
        await first.stop()
        await Member(quorum, 2, **alone).start()
        await until(lambda: [each for each in broker.listener.told if each[0] in ("failure", "snapshot")])
        assert broker.listener.values == values
        assert broker.raft.log.end_offset == end_offset
        await stop_all(quorum)

    asyncio.run(run())


def test_a_node_answers_no_request_while_it_looks_for_another_quorum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its vote and epoch, which it takes on afterwards, it would answer of a quorum that there is not."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = Member(quorum, 1, **SERVERS)
        codes: list[ErrorCode] = []

        async def ask_it(*_: Any) -> None:
            with pytest.raises(KafkaError) as caught:
                await first.raft.describe_quorum(DescribeQuorumRequest(), 2)
            codes.append(caught.value.code)

        monkeypatch.setattr(driver, "check_no_other_quorum", ask_it)
        await first.start()
        assert codes == [ErrorCode.BROKER_NOT_AVAILABLE]
        await until(lambda: first.raft.is_leader)
        await first.raft.describe_quorum(DescribeQuorumRequest(), 2)
        await stop_all(quorum)

    asyncio.run(run())
