"""Damage to one voter's copy of the metadata log: it does not vote until it has again all that was committed."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, until
from tests.unit.replication.quorum.test_driver import add, same_mark, until_done
from tidelog.replication.quorum.metadata_log import LACKING_FILE
from tidelog.storage.loader import Ending
from tidelog.storage.log import CorruptLog

THREE = {1: endpoint(1), 2: endpoint(2), 3: endpoint(3)}


async def committed(quorum: Quorum, count: int) -> list[bytes]:
    (leader,) = await until(lambda: quorum.leaders)
    values = [b"%d" % number for number in range(count)]
    for value in values:
        leader.raft.append([value], 0)
    await until(lambda: all(member.listener.values == values for member in quorum.up.values()))
    return values


async def stop_all(quorum: Quorum) -> None:
    for member in list(quorum.up.values()):
        await member.stop()


def logs_of(tmp_path: Path, node_id: int) -> Path:
    [folder] = [path for path in tmp_path.rglob("__cluster_metadata-0") if f"{node_id}" in path.parent.name]
    return folder


def flip(folder: Path, share: float) -> None:
    path = folder / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("share", [0.3, 0.99])
def test_a_damaged_voter_votes_again_when_it_has_everything(tmp_path: Path, share: float) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        for node_id in THREE:
            await Member(quorum, node_id).start()
        values = await committed(quorum, 20)
        await stop_all(quorum)
        folder = logs_of(tmp_path, 2)
        flip(folder, share)
        damaged = await Member(quorum, 2).start()
        assert damaged.raft.raft.lacks_records
        assert (folder / LACKING_FILE).exists()
        whole = await Member(quorum, 3).start()
        await asyncio.sleep(2.5)
        assert not quorum.leaders, "two of three lead only if both have all that was committed"
        await Member(quorum, 1).start()
        await until(lambda: quorum.leaders)
        assert damaged not in quorum.leaders
        await until(lambda: damaged.listener.values == values)
        await until(lambda: not damaged.raft.raft.lacks_records)
        assert not (folder / LACKING_FILE).exists()
        await whole.stop()
        await until(lambda: quorum.leaders)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_voter_that_lost_records_remembers_so_when_it_is_stopped_before_it_has_them(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        for node_id in THREE:
            await Member(quorum, node_id).start()
        await committed(quorum, 20)
        await stop_all(quorum)
        flip(logs_of(tmp_path, 2), 0.3)
        for _ in range(2):
            member = await Member(quorum, 2).start()
            assert member.raft.raft.lacks_records
            assert not member.raft.raft.is_voter
            await member.stop()

    asyncio.run(run())


def test_a_voter_that_is_alone_says_what_is_damaged_and_keeps_it(tmp_path: Path) -> None:
    async def run() -> Any:
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1).start()
        await committed(quorum, 20)
        await member.stop()
        folder = logs_of(tmp_path, 1)
        flip(folder, 0.3)
        with pytest.raises(CorruptLog, match="are damaged"):
            await Member(quorum, 1).start()
        assert list(folder.glob("*.damaged"))

    asyncio.run(run())


@pytest.mark.parametrize("what_is_left", ["a part of the last batch", "a part of its header", "all of it, damaged"])
@pytest.mark.parametrize("ending", [Ending.KILLED, None])
def test_a_voter_that_is_alone_starts_behind_a_write_that_a_kill_has_ended(
    tmp_path: Path, what_is_left: str, ending: Ending | None
) -> None:
    """It was not synced, so nothing had acknowledged it. Anything else at the end of the log may have been."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1).start()
        values = await committed(quorum, 20)
        await member.stop()
        path = logs_of(tmp_path, 1) / f"{0:020d}.log"
        data = bytearray(path.read_bytes())
        last = member.raft.log.end_offset - 1
        begin = data.rindex(last.to_bytes(8, "big"))
        if what_is_left == "all of it, damaged":
            data[-1] ^= 1
        else:
            del data[begin + (65 if "header" not in what_is_left else 20) :]
        path.write_bytes(data)
        member = Member(quorum, 1)
        member.ending = ending
        if ending is None or what_is_left == "all of it, damaged":
            with pytest.raises(CorruptLog, match="no other voter has a copy"):
                await member.start()
            return
        await member.start()
        await until(lambda: quorum.leaders)
        await member.listener.has(values[:-1])
        assert not (path.parent / LACKING_FILE).exists()
        await member.stop()

    asyncio.run(run())


def test_a_voter_whose_log_no_longer_names_the_others_finds_them(tmp_path: Path) -> None:
    """Voters that were added are named by records, and those may be what is damaged."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        servers: dict[str, Any] = {"bootstrap_servers": [endpoint(1), endpoint(2), endpoint(3)]}
        first = await Member(quorum, 1, **servers).start()
        await until(lambda: first.raft.is_leader)
        for node_id in (2, 3):
            member = await Member(quorum, node_id, **servers).start()
            await until(partial(same_mark, member, first))
            assert (await until_done(add(member), first.raft.add_voter)).error_code == 0
        values = await committed(quorum, 20)
        await first.stop()
        flip(logs_of(tmp_path, 1), 0.02)
        damaged = await Member(quorum, 1, **servers).start()
        assert damaged.raft.voter_ids() == [1]
        assert damaged.raft.raft.lacks_records
        await until(lambda: damaged.listener.values == values)
        await until(lambda: not damaged.raft.raft.lacks_records)
        assert damaged.raft.voter_ids() == [1, 2, 3]
        await stop_all(quorum)

    asyncio.run(run())
