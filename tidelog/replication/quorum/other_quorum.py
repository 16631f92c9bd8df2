"""A directory that was formatted as the first of a quorum begins none beside one that the cluster has already.

Two quorums of one cluster elect a leader each. A broker follows the higher epoch, at the latest after a restart, and
sets aside the logs that the metadata there do not name.
"""

from __future__ import annotations

import asyncio

from tidelog.replication.quorum.files.vote_store import InconsistentVoters
from tidelog.replication.quorum.voter_fetch import AskingNode, fetch_from_voter


async def check_no_other_quorum(node: AskingNode, cluster_id: str) -> None:
    """Ask the bootstrap servers whether the cluster has elected a leader before. Those that do not answer, or of
    another cluster, do not count. A quorum in which this node votes takes it in: its leader sends BeginQuorumEpoch.
    Raises InconsistentVoters.
    """
    settings = node.settings
    own = [endpoint for _, endpoint in settings.own_endpoints]
    servers = [server for server in settings.bootstrap_servers if server not in own]
    purpose = "the search for another quorum of this cluster"
    answers = await asyncio.gather(*(fetch_from_voter(node, cluster_id, server, 0, purpose) for server in servers))
    for server, answer in zip(servers, answers, strict=True):
        if answer is not None and answer.epoch > 0 and all(peer.id != node.raft.own.id for peer in answer.nodes):
            raise InconsistentVoters(
                f"this directory was formatted with --standalone, as the first of a quorum, but {server} knows one of "
                f"this cluster (epoch {answer.epoch}): format it without --standalone, and add it with `tidelog quorum "
                "add-voter`. To begin another quorum all the same, remove the other servers from "
                "controller.quorum.bootstrap.servers"
            )
