"""A second directory that was formatted as the first of a quorum: no second quorum of the cluster begins."""

from __future__ import annotations

import asyncio
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, stop_all, until
from tests.unit.replication.quorum.test_driver import same_mark
from tests.unit.replication.quorum.test_metadata_damage import SERVERS, committed, with_added_voters
from tidelog.replication.quorum.driver import InconsistentVoters


def test_a_controller_formatted_as_the_first_begins_no_quorum_beside_another(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.raft.is_leader)
        quorum.format_dynamic(2)
        with pytest.raises(InconsistentVoters, match="without --standalone"):
            await Member(quorum, 2, **SERVERS).start()
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
        quorum.format_dynamic(1)
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.raft.is_leader)
        await until(partial(same_mark, waiting, first))
        await first.stop()
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.raft.is_leader)
        await stop_all(quorum)

    asyncio.run(run())


def test_another_quorum_begins_where_only_its_own_address_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {})
        quorum.format_dynamic(1)
        first = await Member(quorum, 1, **SERVERS).start()
        await until(lambda: first.raft.is_leader)
        quorum.format_dynamic(2)
        second = await Member(quorum, 2, bootstrap_servers=[endpoint(2)]).start()
        await until(lambda: second.raft.is_leader)
        await stop_all(quorum)

    asyncio.run(run())
