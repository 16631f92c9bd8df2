"""The metrics of the node itself: requests, their durations, connections,
waiting requests, lags of groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.metrics.exposition import Exposition
    from tidelog.broker.metrics.partitions import PartitionTotals
    from tidelog.broker.metrics.sources import Sources
    from tidelog.broker.network.counters import RequestCounters

# The bound of lag series; each is a group, a topic and a partition.
LAGS_SHOWN_MAX = 1_000
CONSUMERS, FOLLOWERS = "consumers", "followers"
_GROUP_STATES = ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead")
_CODES = {int(code): code.name for code in ErrorCode}


def collect_info(sources: Sources, is_ready: bool, out: Exposition) -> None:
    config = sources.config
    roles = ",".join(config.items("process.roles"))
    out.add("tidelog_info", 1, __version__, str(config.node_id), sources.cluster_id, roles)
    out.add("tidelog_ready", is_ready)


def collect_requests(requests: RequestCounters, broker: BrokerSide | None, out: Exposition) -> None:
    if broker is not None:
        # The answers to followers' sessions count these errors.
        requests.fetch_follower.errors = broker.partitions.follower_fetches.answers.errors
    for counters in requests.apis.values():
        counts_by_version = {version: count for version, count in counters.versions.items() if count}
        if not counts_by_version:
            continue  # APIs without requests are omitted
        for version, count in counts_by_version.items():
            out.add("tidelog_requests_total", count, counters.name, str(version))
        out.add_histogram("tidelog_request_duration_seconds", counters.durations, counters.name)
        for code, count in sorted(counters.errors.items()):
            out.add("tidelog_request_errors_total", count, counters.name, _CODES.get(code, str(code)))


def collect_connections(sources: Sources, out: Exposition) -> None:
    by_listener = {listener.name: 0 for listener in sources.config.listeners}
    for role, server in sources.servers.items():
        for connection in server.connections:
            by_listener[connection.listener_name] = by_listener.get(connection.listener_name, 0) + 1
        out.add("tidelog_connections_accepted_total", server.accepted, role)
        out.add("tidelog_connections_refused_total", server.refused, role)
        for reason, count in server.cut.items():
            out.add("tidelog_connections_cut_total", count, role, reason)
        out.add("tidelog_receive_buffer_bytes", server.receive_bytes, role)
    for listener, count in by_listener.items():
        out.add("tidelog_connections", count, listener)


def collect_waiting(
    sources: Sources, broker: BrokerSide | None, totals: PartitionTotals | None, out: Exposition
) -> None:
    tasks = sum(dispatcher.tasks_under_way for dispatcher in sources.dispatchers)
    out.add("tidelog_requests_waiting", tasks, "Other")
    if broker is None or totals is None:
        return
    partitions = broker.partitions
    out.add("tidelog_requests_waiting", totals.produces_waiting, "Produce")
    # The deadline of a produce calls a method of its Deferred; all other
    # deadlines are consumers' fetches.
    deadlines = partitions.deadlines.waiting()
    fetches = sum(not isinstance(getattr(callback, "__self__", None), Deferred) for callback in deadlines)
    out.add("tidelog_requests_waiting", fetches, "FetchConsumer")
    followers = partitions.follower_fetches.sessions.values()
    out.add("tidelog_requests_waiting", sum(session.parked is not None for session in followers), "FetchFollower")
    consumers = list(partitions.fetch_sessions)
    out.add("tidelog_fetch_sessions", len(consumers), CONSUMERS)
    out.add("tidelog_fetch_session_partitions", sum(len(session.partitions) for session in consumers), CONSUMERS)
    out.add("tidelog_fetch_session_evictions_total", partitions.fetch_sessions.evictions)
    out.add("tidelog_fetch_sessions", len(followers), FOLLOWERS)
    out.add("tidelog_fetch_session_partitions", sum(len(session.entries) for session in followers), FOLLOWERS)


def collect_groups(broker: BrokerSide, out: Exposition) -> None:
    states = dict.fromkeys(_GROUP_STATES, 0)
    try:
        states.update(broker.groups.group_counts())
    except KafkaError:
        return  # while groups load, a partial count would look like deleted groups
    for state, count in states.items():
        out.add("tidelog_groups", count, state)
    lags, is_complete = broker.groups.lags(LAGS_SHOWN_MAX)
    for group_id, topic, partition, lag_records in lags:
        out.add("tidelog_group_lag_records", lag_records, group_id, topic, str(partition))
    out.add("tidelog_group_lag_series_left_out", not is_complete)
