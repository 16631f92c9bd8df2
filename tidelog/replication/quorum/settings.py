"""What the metadata quorum is told at its start: who may vote, where they listen, how long to wait for what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidelog.replication.ports import Endpoint


@dataclass(frozen=True, slots=True)
class QuorumSettings:
    """Kafka's `controller.quorum.*`.

    `voters`: the static ones (controller.quorum.voters). Without them and without `bootstrap_servers` the node is alone;
    voters that the metadata log names itself (kraft.version 1) win over both.
    """

    voters: Mapping[int, Endpoint] = field(default_factory=dict)
    bootstrap_servers: Sequence[Endpoint] = ()
    own_endpoints: Sequence[tuple[str, Endpoint]] = ()
    election_timeout_ms: int = 1000
    fetch_timeout_ms: int = 2000
    election_backoff_max_ms: int = 1000
    request_timeout_ms: int = 2000
    retry_backoff_ms: int = 20
    fetch_wait_ms: int = 500
