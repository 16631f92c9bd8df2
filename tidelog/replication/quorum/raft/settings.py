"""What the metadata quorum is told at its start: who may vote, where they listen, how long to wait for what. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.metadata_retention import KAFKA_RETENTION, MetadataRetention


@dataclass(frozen=True, eq=False, repr=False)
class QuorumSettings:
    """Kafka's `controller.quorum.*`, and what Kafka has as constants.

    `voters`: the static ones (controller.quorum.voters). Without them and without `bootstrap_servers` the node is
    alone. Voters that the metadata log names itself (kraft.version 1) win over both.
    """

    voters: Mapping[int, Endpoint] = field(default_factory=dict)
    bootstrap_servers: Sequence[Endpoint] = ()
    own_endpoints: Sequence[tuple[str, Endpoint]] = ()
    """(listener name, where it can be reached), the first one for the other voters."""
    election_timeout_ms: int = 1000
    fetch_timeout_ms: int = 2000
    election_backoff_max_ms: int = 1000
    request_timeout_ms: int = 2000
    retry_backoff_ms: int = 20
    retry_backoff_max_ms: int = 1000
    fetch_wait_ms: int = 500
    fetch_bytes_max: int = 8 * 1024 * 1024
    snapshot_part_bytes: int = 1024 * 1024
    start_delay_max_ms: int = 100
    """A voter that knows no leader asks for pre-votes after a part of this: no running quorum is disturbed by it."""
    gone_delay_max_ms: int = 50
    """The same where the leader's port refuses, or the leader said that it resigns."""
    pre_vote_retry_ms: int = 40
    retention: MetadataRetention = KAFKA_RETENTION
    scrub_interval_ms: float = math.inf
    """How often the log is read again to find damage (log.scrub.interval.ms)."""
    scrub_bytes_per_s: int = 0
    """0: never (log.scrub.bytes.per.second)."""
