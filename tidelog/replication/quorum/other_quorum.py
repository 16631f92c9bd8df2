"""A directory that was formatted as the first of a quorum begins none beside one that the cluster has already.

Two quorums of one cluster elect a leader each. A broker follows the higher epoch, at the latest after a restart, and
sets aside the logs that the metadata there do not name.
"""

from __future__ import annotations

import asyncio

from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.files.vote_store import InconsistentVoters
from tidelog.replication.quorum.raft.messages import FetchAnswer
from tidelog.replication.quorum.voter_fetch import AskingNode, fetch_from_voter


async def check_no_other_quorum(node: AskingNode, cluster_id: str) -> None:
    """Ask the bootstrap servers whether the cluster has elected a leader before. Those that do not answer, or of
    another cluster, do not count. A quorum in which this node votes takes it in: its leader sends BeginQuorumEpoch.
    Raises InconsistentVoters.
    """
    settings = node.settings
    own = [endpoint for _, endpoint in settings.own_endpoints]
    servers = [server for server in settings.bootstrap_servers if server not in own]
    asked = await asyncio.gather(*(_ask(node, cluster_id, server) for server in servers))
    # While one of them did not answer, another quorum may have begun at those that had.
    quick_s = max((duration_s for _, duration_s in asked), default=0.0) / 2
    again = [server for server, (_, duration_s) in zip(servers, asked, strict=True) if duration_s < quick_s]
    asked += await asyncio.gather(*(_ask(node, cluster_id, server) for server in again))
    for server, (answer, _) in zip([*servers, *again], asked, strict=True):
        if answer is not None and answer.epoch > 0 and all(peer.id != node.raft.own.id for peer in answer.nodes):
            raise InconsistentVoters(
                f"this directory was formatted with --standalone, as the first of a quorum, but {server} knows one of "
                f"this cluster (epoch {answer.epoch}): format it without --standalone, and add it with `tidelog quorum "
                "add-voter`. To begin another quorum all the same, remove the other servers from "
                "controller.quorum.bootstrap.servers"
            )


async def _ask(node: AskingNode, cluster_id: str, server: Endpoint) -> tuple[FetchAnswer | None, float]:
    """The answer, and the seconds that it took."""
    clock_s = asyncio.get_running_loop().time
    began_s = clock_s()
    answer = await fetch_from_voter(node, cluster_id, server, 0, "the search for another quorum of this cluster")
    return answer, clock_s() - began_s
