"""The settings of the metadata quorum: its static voters, their addresses and the timeouts. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.raft.metadata_retention import KAFKA_RETENTION, MetadataRetention


@dataclass(frozen=True, eq=False, repr=False)
class QuorumSettings:
    """Kafka's `controller.quorum.*` configs, and settings that are constants in Kafka.

    `voters`: the static voters (controller.quorum.voters). Without them and without `bootstrap_servers` the node is an
    only voter. Voters in the metadata log (kraft.version 1) take precedence over both.
    """

    voters: Mapping[int, Endpoint] = field(default_factory=dict)
    bootstrap_servers: Sequence[Endpoint] = ()
    own_endpoints: Sequence[tuple[str, Endpoint]] = ()
    """(listener name, endpoint); the other voters use the first one."""
    election_timeout_ms: int = 1000
    fetch_timeout_ms: int = 2000
    election_backoff_max_ms: int = 1000
    request_timeout_ms: int = 2000
    retry_backoff_ms: int = 20
    retry_backoff_max_ms: int = 1000
    fetch_wait_ms: int = 500
    fetch_bytes_max: int = 1024 * 1024
    snapshot_part_bytes: int = 1024 * 1024
    start_delay_max_ms: int = 100
    """At its start, a voter without a known leader requests pre-votes after a random part of this time. Pre-votes do
    not disturb a running quorum.
    """
    gone_delay_max_ms: int = 50
    """The same delay after the leader's port has refused a connection or the leader has resigned."""
    pre_vote_retry_ms: int = 40
    retention: MetadataRetention = KAFKA_RETENTION
    scrub_interval_ms: float = math.inf
    """The interval between two reads of the whole log to detect damage (log.scrub.interval.ms)."""
    scrub_bytes_per_s: int = 0
    """The rate of these reads; 0 disables them (log.scrub.bytes.per.second)."""
