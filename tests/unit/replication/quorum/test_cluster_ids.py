"""A node of another cluster gets no answers, and says that this is why it waits."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, stop_all, until


def test_a_node_says_that_it_is_of_another_cluster(tmp_path: Path) -> None:
    async def run() -> None:
        quorum = Quorum(tmp_path, {1: endpoint(1), 2: endpoint(2)})
        first = await Member(quorum, 1).start()
        await asyncio.sleep(0.1)
        assert first.raft.misfit == ""
        ours, quorum.cluster_id = quorum.cluster_id, "BBBBBBBBBBBBBBBBBBBBBB"
        second = await Member(quorum, 2).start()
        await until(lambda: first.raft.misfit and second.raft.misfit)
        assert "node:9002" in first.raft.misfit
        assert ours in first.raft.misfit
        assert "node:9001" in second.raft.misfit
        await second.stop()
        meta = tmp_path / "2" / "meta.properties"
        meta.write_text(meta.read_text().replace(quorum.cluster_id, ours))
        quorum.cluster_id = ours
        second = await Member(quorum, 2).start()
        await until(lambda: quorum.leaders)
        await until(lambda: first.raft.misfit == second.raft.misfit == "")
        await stop_all(quorum)

    asyncio.run(run())
