"""Damage to the metadata logs of several voters: they repair each other, though none of them can lead."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import THREE, Member, Quorum, stop_all, three, until
from tests.unit.replication.quorum.test_metadata_damage import committed, committed_without, flip, logs_of
from tidelog.protocol.batches.record_batch import iter_headers, read_header
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.messages.vote import VoteRequest
from tidelog.replication.ports import Endpoint, PeerUnreachable
from tidelog.replication.quorum import metadata_repair
from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.replication.quorum.files.records_lost import LACKING_FILE


async def stopped_with(tmp_path: Path, quorum: Quorum) -> list[bytes]:
    for node_id in THREE:
        await Member(quorum, node_id).start()
    values = await committed(quorum, 30)
    await stop_all(quorum)
    return values


async def damaged_log(tmp_path: Path, quorum: Quorum) -> tuple[MetadataLog, bytes]:
    """The log of a started voter that was damaged in its middle, and the bytes of a whole one."""
    await stopped_with(tmp_path, quorum)
    flip(logs_of(tmp_path, 2), 0.5)
    whole = (logs_of(tmp_path, 1) / f"{0:020d}.log").read_bytes()
    return (await Member(quorum, 2).start()).raft.log, whole


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_voters_that_are_damaged_in_different_places_repair_each_other(tmp_path: Path, times: int) -> None:
    """No log is whole, every record is whole in two of them; `times`: in how many places each is damaged."""

    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        values = await stopped_with(tmp_path, quorum)
        for node_id in THREE:
            for number in range(times):
                flip(logs_of(tmp_path, node_id), 0.2 + 0.1 * node_id + 0.35 * number)
        for node_id in THREE:
            member = await Member(quorum, node_id).start()
            assert member.raft.raft.lacks_records
        (leader,) = await until(lambda: quorum.leaders)
        leader.raft.append([b"more"], 0)
        for member in quorum.up.values():
            await member.listener.has([*values, b"more"])
        await until(lambda: not any(member.raft.raft.lacks_records for member in quorum.up.values()))
        assert not any((logs_of(tmp_path, node_id) / LACKING_FILE).exists() for node_id in THREE)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_voter_that_lost_the_end_of_a_segment_is_repaired_across_it(tmp_path: Path, is_lost: bool) -> None:
    """What both voters have begins in the next segment, or behind a segment that `is_lost`."""

    async def run() -> None:
        quorum = Quorum(tmp_path, THREE, segment_bytes=1 << 10)
        values = await stopped_with(tmp_path, quorum)
        first, second, *_, last = sorted(logs_of(tmp_path, 3).glob("*.log"))
        os.truncate(first, list(iter_headers(first.read_bytes()))[-1][0])
        if is_lost:
            second.unlink()
        for node_id in (1, 2):
            path = logs_of(tmp_path, node_id) / last.name
            os.truncate(path, path.stat().st_size - node_id)
        for node_id in THREE:
            member = await Member(quorum, node_id).start()
            assert member.raft.raft.lacks_records
        for member in quorum.up.values():
            await member.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
def test_a_damaged_voter_and_one_that_is_behind_lead_when_they_have_everything_together(tmp_path: Path) -> None:
    async def run() -> None:
        quorum, _ = await three(tmp_path)
        await committed(quorum, 19)
        values = await committed_without(quorum, 3, b"3 lacks it")
        await stop_all(quorum)
        flip(logs_of(tmp_path, 2), 0.3)
        damaged, behind = [await Member(quorum, node_id).start() for node_id in (2, 3)]
        await until(lambda: quorum.leaders)
        for member in (damaged, behind):
            await member.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


@pytest.mark.slow
def test_a_voter_that_is_damaged_again_before_it_is_repaired_keeps_what_it_kept(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        values = await stopped_with(tmp_path, quorum)
        for share in (0.5, 0.3):
            flip(logs_of(tmp_path, 1), share)
            member = await Member(quorum, 1).start()
            assert member.raft.raft.lacks_records
            await member.stop()
        flip(logs_of(tmp_path, 2), 0.8)
        flip(logs_of(tmp_path, 3), 0.95)
        for node_id in THREE:
            await Member(quorum, node_id).start()
        for member in quorum.up.values():
            await member.listener.has(values)
        await stop_all(quorum)

    asyncio.run(run())


def test_records_of_another_voter_are_taken_only_up_to_a_batch_that_both_have(tmp_path: Path) -> None:
    """Otherwise they could be of another history: uncommitted records of a leader that was replaced."""

    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        log, whole = await damaged_log(tmp_path, quorum)
        cut_at, end = log.end_offset, max(header.next_offset for _, header in iter_headers(whole))
        batches = [
            (header.base_offset, whole[position : position + header.size_bytes])
            for position, header in iter_headers(whole)
            if header.base_offset >= cut_at
        ]
        other = encode_batch([(0, None, b"another", ())])
        epoch = read_header(whole).partition_leader_epoch
        for base_offset in (cut_at, cut_at + 1):
            other[:8] = base_offset.to_bytes(8, "big")
            other[12:16] = epoch.to_bytes(4, "big")
            swapped = [
                bytes(other) if at == base_offset else data for at, data in batches[: 2 if base_offset > cut_at else 1]
            ]
            assert log.restore(b"".join(swapped), 0) == cut_at
        damaged = bytearray(batches[0][1])
        damaged[-1] ^= 1
        assert log.restore(bytes(damaged) + batches[1][1], 0) == cut_at
        assert log.restore(batches[1][1], 0) == cut_at
        assert log.restore(b"", 0) == cut_at
        assert log.restore(batches[0][1] + batches[1][1], 0) == end
        await stop_all(quorum)

    asyncio.run(run())


def test_a_lost_end_is_taken_up_to_what_was_acknowledged_in_the_same_epoch(tmp_path: Path) -> None:
    """Nothing whole of it is kept. As where the other voter has lost what it alone had, so that it cannot lead."""

    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        await stopped_with(tmp_path, quorum)
        path = logs_of(tmp_path, 2) / f"{0:020d}.log"
        whole = path.read_bytes()
        last = max(position for position, _ in iter_headers(whole))
        os.truncate(path, last)
        log = (await Member(quorum, 2).start()).raft.log
        cut_at, end = log.end_offset, log.acknowledged_end
        assert log.lacks_records
        assert end is not None
        other = bytearray(whole[last:])
        other[12:16] = (end.epoch + 1).to_bytes(4, "big")
        assert log.restore(bytes(other), 0) == cut_at
        assert log.restore(whole[last:], 0) == end.end_offset > cut_at
        await stop_all(quorum)

    asyncio.run(run())


class WithoutVotes(Quorum):
    """No node becomes the leader."""

    async def exchange(self, source: int, target: Endpoint, request: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(request, VoteRequest):
            raise PeerUnreachable("no answer in time")
        return await super().exchange(source, target, request, *args, **kwargs)


def test_an_answer_that_ends_one_record_before_what_was_acknowledged_is_completed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        monkeypatch.setattr(metadata_repair, "LOOK_S", 0.01)
        await stopped_with(tmp_path, Quorum(tmp_path, THREE))
        path = logs_of(tmp_path, 2) / f"{0:020d}.log"
        whole = path.read_bytes()
        (start, _), _, (last, header) = list(iter_headers(whole))[-3:]
        os.truncate(path, start)
        quorum = WithoutVotes(tmp_path, THREE)
        await Member(quorum, 1).start()
        damaged = (await Member(quorum, 2, fetch_bytes_max=last - start).start()).raft
        assert damaged.raft.lacks_records
        await until(lambda: not damaged.raft.lacks_records)
        assert damaged.log.end_offset == header.next_offset
        await stop_all(quorum)
        assert path.read_bytes()[: len(whole)] == whole

    asyncio.run(run())


def test_what_was_kept_does_not_follow_records_of_a_later_leader(tmp_path: Path) -> None:
    """A leader has replaced what was not committed, and the voter was damaged again before it had everything."""

    async def run() -> None:
        quorum = Quorum(tmp_path, THREE)
        log, whole = await damaged_log(tmp_path, quorum)
        later = encode_batch([(0, None, b"later", ())])
        later[:8] = log.end_offset.to_bytes(8, "big")
        epoch_max = max(header.partition_leader_epoch for _, header in iter_headers(whole))  # of several elections
        later[12:16] = (epoch_max + 1).to_bytes(4, "big")
        log.append_replicated(memoryview(later), 0)
        end = log.end_offset
        assert log.restore(b"", 0) == end
        await stop_all(quorum)

    asyncio.run(run())
