"""A voter comes back at another address, and tells the leader (UpdateRaftVoter, KIP-853)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, endpoint, stop_all, until
from tidelog.protocol.messages.update_raft_voter import UpdateRaftVoterRequest
from tidelog.replication.ports import Endpoint, PeerUnreachable

IDS = (1, 2, 3)
BOOTSTRAP = [endpoint(node_id) for node_id in IDS]


class LosingQuorum(Quorum):
    """Loses so many updates of voters, before or after they have arrived."""

    lost_before = lost_after = updates = 0

    async def exchange(self, source: int, target: Endpoint, request: Any, version: int, **options: Any) -> Any:
        is_update = isinstance(request, UpdateRaftVoterRequest)
        self.updates += is_update
        if is_update and self.lost_before:
            self.lost_before -= 1
            raise PeerUnreachable("no answer in time")
        response = await super().exchange(source, target, request, version, **options)
        if is_update and self.lost_after:
            self.lost_after -= 1
            raise PeerUnreachable("no answer in time")
        return response


def member(quorum: Quorum, node_id: int, **settings: Any) -> Member:
    quick = {"fetch_timeout_ms": 500, "retry_backoff_ms": 5, "retry_backoff_max_ms": 50}
    return Member(quorum, node_id, bootstrap_servers=BOOTSTRAP, **{**quick, **settings})


@pytest.mark.parametrize(("lost_before", "lost_after"), [(0, 0), (1, 0), (3, 0), (0, 1)])
def test_a_voter_at_another_address_tells_the_leader_until_it_knows(tmp_path, lost_before, lost_after):
    async def run():
        quorum = LosingQuorum(tmp_path, {})
        quorum.format_dynamic(*IDS)
        for node_id in IDS:
            await member(quorum, node_id).start()
        (leader,) = await until(lambda: quorum.leaders)
        moved_id = next(node_id for node_id in IDS if node_id != leader.node_id)
        await quorum.up[moved_id].stop()
        quorum.lost_before, quorum.lost_after = lost_before, lost_after
        address = Endpoint("elsewhere", endpoint(moved_id).port)
        await member(quorum, moved_id, own_endpoints=[("CONTROLLER", address)]).start()

        def known(each: Member) -> Endpoint | None:
            voter = each.raft.voters().get(moved_id)
            assert voter is not None
            return voter.endpoint

        await until(lambda: quorum.leaders and all(known(each) == address for each in quorum.up.values()))
        sent = quorum.updates
        await asyncio.sleep(0.2)
        assert quorum.updates == sent <= lost_before + lost_after + 2
        await stop_all(quorum)

    asyncio.run(run())
