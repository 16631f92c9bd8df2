"""Damage to one voter's copy of the metadata log: it does not vote until it has again all that was committed."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, stop_all, three, until
from tests.unit.replication.quorum.test_driver import add, same_mark, until_done
from tidelog.replication.quorum.acknowledged import FILE_NAME, AcknowledgedEnd
from tidelog.replication.quorum.files.records_lost import LACKING_FILE
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import CorruptLog


async def committed(quorum: Quorum, count: int) -> list[bytes]:
    (leader,) = await until(lambda: quorum.leaders)
    values = [b"%d" % number for number in range(count)]
    for value in values:
        leader.raft.append([value], 0)
    await until(lambda: all(member.listener.values == values for member in quorum.up.values()))
    return values


async def committed_without(quorum: Quorum, absent_id: int, value: bytes) -> list[bytes]:
    """One more, while a voter is stopped."""
    await quorum.up[absent_id].stop()
    (leader,) = await until(lambda: quorum.leaders)
    leader.raft.append([value], 0)
    await until(lambda: all(member.listener.values[-1:] == [value] for member in quorum.up.values()))
    return list(leader.listener.values)


def acknowledge(folder: Path, end_offset: int) -> None:
    """The voter had acknowledged no more than this when it was killed."""
    end = AcknowledgedEnd(OsDisk(), str(folder))
    known = end.read()
    assert known is not None
    end.write(known._replace(end_offset=end_offset))
    end.close()


def logs_of(tmp_path: Path, node_id: int) -> Path:
    [folder] = [path for path in tmp_path.rglob("__cluster_metadata-0") if f"{node_id}" in path.parent.name]
    return folder


def flip(folder: Path, share: float) -> None:
    path = folder / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_voter_votes_again_when_it_has_everything(tmp_path: Path) -> None:
    """Its last record is damaged, which the voter that is there lacks, too."""

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await committed(quorum, 19)
        values = await committed_without(quorum, 3, b"3 lacks it")
        await stop_all(quorum)
        folder = logs_of(tmp_path, 2)
        flip(folder, 0.99)
        damaged = await Member(quorum, 2).start()
        assert damaged.raft.raft.lacks_records
        assert (folder / LACKING_FILE).exists()
        behind = await Member(quorum, 3).start()
        await asyncio.sleep(2.5)
        assert not quorum.leaders, "two of three lead only if one has all that was committed"
        assert "Start the voters whose logs are whole" in damaged.raft.loss
        await Member(quorum, 1).start()
        await until(lambda: quorum.leaders)
        assert damaged not in quorum.leaders
        await until(lambda: damaged.listener.values == values)
        await until(lambda: not damaged.raft.raft.lacks_records)
        assert not (folder / LACKING_FILE).exists()
        await behind.stop()
        await until(lambda: quorum.leaders)
        await stop_all(quorum)

    asyncio.run(run())


def test_a_voter_that_lost_records_remembers_so_when_it_is_stopped_before_it_has_them(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path)
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
@pytest.mark.parametrize("was_synced", [False, True])
@pytest.mark.parametrize("ending", [Ending.KILLED, None])
def test_a_voter_that_is_alone_starts_behind_a_write_that_a_kill_has_ended(
    tmp_path: Path, what_is_left: str, ending: Ending | None, was_synced: bool
) -> None:
    """Where it was not synced, nothing had acknowledged it."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        member = await Member(quorum, 1).start()
        values = await committed(quorum, 20)
        await member.stop()
        path = logs_of(tmp_path, 1) / f"{0:020d}.log"
        data = bytearray(path.read_bytes())
        begin, end_offset = last_batch(bytes(data))
        last = end_offset - 1
        if what_is_left == "all of it, damaged":
            data[-1] ^= 1
        else:
            del data[begin + (65 if "header" not in what_is_left else 20) :]
        path.write_bytes(data)
        if not was_synced:
            acknowledge(path.parent, last)
        member = Member(quorum, 1)
        member.ending = ending
        if was_synced:
            with pytest.raises(CorruptLog, match="no other voter has a copy"):
                await member.start()
            return
        await member.start()
        await until(lambda: quorum.leaders)
        await member.listener.has(values[:-1])
        assert not (path.parent / LACKING_FILE).exists()
        await member.stop()

    asyncio.run(run())


SERVERS: dict[str, Any] = {"bootstrap_servers": [endpoint(1), endpoint(2), endpoint(3)]}


async def with_added_voters(quorum: Quorum) -> Member:
    """Start node 1 alone, and add 2 and 3 as voters. Returns the first one, which leads."""
    quorum.format_dynamic(1)
    first = await Member(quorum, 1, **SERVERS).start()
    await until(lambda: first.raft.is_leader)
    for node_id in (2, 3):
        member = await Member(quorum, node_id, **SERVERS).start()
        await until(partial(same_mark, member, first))
        assert (await until_done(add(member), first.raft.add_voter)).error_code == 0
    return first


def test_a_voter_whose_log_no_longer_names_the_others_finds_them(tmp_path: Path) -> None:
    """Voters that were added are named by records, and those may be what is damaged."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        first = await with_added_voters(quorum)
        values = await committed(quorum, 20)
        await first.stop()
        flip(logs_of(tmp_path, 1), 0.02)
        damaged = await Member(quorum, 1, **SERVERS).start()
        assert damaged.raft.voter_ids() == [1]
        assert damaged.raft.raft.lacks_records
        await until(lambda: damaged.listener.values == values)
        await until(lambda: not damaged.raft.raft.lacks_records)
        assert damaged.raft.voter_ids() == [1, 2, 3]
        await stop_all(quorum)

    asyncio.run(run())


def test_voters_that_were_added_know_the_voters_below_the_damage(tmp_path: Path) -> None:
    """They have no snapshot that names them. They did not read their logs again, and none of them ran for the lead."""

    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        first = await with_added_voters(quorum)
        values = await committed(quorum, 20)
        for node_id in (2, 3):
            await quorum.up[node_id].stop()
            flip(logs_of(tmp_path, node_id), 0.8)
            damaged = await Member(quorum, node_id, **SERVERS).start()
            assert damaged.raft.raft.lacks_records
            assert (damaged.raft.voter_ids(), damaged.raft.kraft_version) == ([1, 2, 3], 1)
            await damaged.listener.has(values)
        await until(lambda: not any(member.raft.raft.lacks_records for member in quorum.up.values()))
        await first.stop()
        await until(lambda: quorum.leaders)
        await stop_all(quorum)

    asyncio.run(run())


def last_batch(data: bytes | bytearray) -> tuple[int, int]:
    """Where the last batch of a log begins, and the offset behind it."""
    begin = position = 0
    while position < len(data):
        begin = position
        position += 12 + int.from_bytes(data[position + 8 : position + 12], "big")
    base_offset = int.from_bytes(data[begin : begin + 8], "big")
    last_offset_delta = int.from_bytes(data[begin + 23 : begin + 27], "big")
    return begin, base_offset + last_offset_delta + 1


async def killed(quorum: Quorum, node_id: int) -> Member:
    member = Member(quorum, node_id)
    member.ending = Ending.KILLED
    return await member.start()


def test_two_voters_whose_last_write_was_torn_by_a_kill_elect_a_leader(tmp_path: Path) -> None:
    """They had acknowledged nothing of it, so that nothing is lost.

    Their logs may end at different offsets: the two that are left when a leader stops can elect the next.
    """

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        values = await committed(quorum, 20)
        await stop_all(quorum)
        for node_id in (1, 2):
            path = logs_of(tmp_path, node_id) / f"{0:020d}.log"
            data = path.read_bytes()
            begin, end_offset = last_batch(bytes(data))
            batch = bytearray(data[begin:])
            batch[:8] = end_offset.to_bytes(8, "big")
            path.write_bytes(data + batch[:-3])
        members = [await killed(quorum, node_id) for node_id in (1, 2)]
        await until(lambda: quorum.leaders)
        for member in members:
            assert not (Path(member.raft.log.directory) / LACKING_FILE).exists()
            await member.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


def test_voters_that_lost_records_elect_one_that_has_them(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path)
        values = await committed(quorum, 20)
        await stop_all(quorum)
        for node_id in (1, 2):
            flip(logs_of(tmp_path, node_id), 0.3 * node_id)
        damaged = [await killed(quorum, node_id) for node_id in (1, 2)]
        assert all(member.raft.raft.lacks_records for member in damaged)
        whole = await killed(quorum, 3)
        (leader,) = await until(lambda: quorum.leaders)
        assert leader is whole
        for member in damaged:
            await member.listener.has(values)
        await until(lambda: not any(member.raft.raft.lacks_records for member in damaged))
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
def test_a_voter_that_lost_records_remembers_over_a_second_damage_what_it_had(tmp_path: Path) -> None:
    """It is damaged again before it has everything: what it acknowledged in between counts, too."""

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await committed(quorum, 19)
        values = await committed_without(quorum, 3, b"3 lacks it")
        await stop_all(quorum)
        for share in (0.9, 0.3):
            flip(logs_of(tmp_path, 2), share)
            damaged = await killed(quorum, 2)
            assert damaged.raft.raft.lacks_records
            await damaged.stop()
        damaged = await killed(quorum, 2)
        await killed(quorum, 3)
        await asyncio.sleep(2.0)
        assert not quorum.leaders
        await killed(quorum, 1)
        await damaged.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_log_that_was_cut_between_two_batches_is_known_to_lack_records(tmp_path: Path, is_remembered: bool) -> None:
    """No byte of it is wrong; only what was acknowledged says that something is missing."""

    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await committed(quorum, 20)
        await stop_all(quorum)
        folder = logs_of(tmp_path, 1)
        for checkpoint in folder.parent.glob("*-checkpoint"):
            checkpoint.unlink()  # they are written once a minute, and so may be of long ago
        path = folder / f"{0:020d}.log"
        data = path.read_bytes()
        path.write_bytes(data[: last_batch(data)[0]])
        if not is_remembered:
            (folder / FILE_NAME).write_bytes(b"damaged as well")
        member = await killed(quorum, 1)
        assert member.raft.raft.lacks_records is is_remembered
        await member.stop()

    asyncio.run(run())


def test_a_voter_follows_a_leader_that_cuts_its_log_and_does_not_take_that_for_a_loss(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await committed(quorum, 5)
        (leader,) = quorum.leaders
        end_offset = leader.raft.end_offset
        follower = next(member for member in quorum.up.values() if member is not leader)
        log = follower.raft.log
        await until(lambda: log.acknowledged_end is not None and log.acknowledged_end.end_offset == end_offset)
        log.truncate_to(end_offset - 1)
        assert log.acknowledged_end is not None
        assert log.acknowledged_end.end_offset == end_offset - 1
        await stop_all(quorum)

    asyncio.run(run())
