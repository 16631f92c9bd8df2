"""The metrics of the node itself: what it was asked, how long that took, who is connected, what waits, groups' lags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.version import __version__

if TYPE_CHECKING:
    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.metrics.exposition import Exposition
    from tidelog.broker.metrics.partitions import Survey
    from tidelog.broker.metrics.sources import Sources
    from tidelog.broker.network.counters import RequestCounters

# Series of groups' lags; each is a group, a topic and a partition.
LAGS_SHOWN_MAX = 1_000
CONSUMERS, FOLLOWERS = "consumers", "followers"
_GROUP_STATES = ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead")
_CODES = {int(code): code.name for code in ErrorCode}


def tell_info(sources: Sources, is_ready: bool, out: Exposition) -> None:
    config = sources.config
    roles = ",".join(config.items("process.roles"))
    out.add("tidelog_info", 1, __version__, str(config.node_id), sources.cluster_id, roles)
    out.add("tidelog_ready", is_ready)


def tell_requests(requests: RequestCounters, broker: BrokerSide | None, out: Exposition) -> None:
    if broker is not None:
        # Counted where followers' sessions are answered.
        requests.fetch_follower.errors = broker.partitions.follower_fetches.answers.errors
    for counters in requests.apis.values():
        asked = {version: count for version, count in counters.versions.items() if count}
        if not asked:
            continue  # what nobody asks for fills no page
        for version, count in asked.items():
            out.add("tidelog_requests_total", count, counters.name, str(version))
        out.add_histogram("tidelog_request_duration_seconds", counters.durations, counters.name)
        for code, count in sorted(counters.errors.items()):
            out.add("tidelog_request_errors_total", count, counters.name, _CODES.get(code, str(code)))


def tell_connections(sources: Sources, out: Exposition) -> None:
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


def tell_waiting(sources: Sources, broker: BrokerSide | None, found: Survey | None, out: Exposition) -> None:
    tasks = sum(dispatcher.tasks_under_way for dispatcher in sources.dispatchers)
    out.add("tidelog_requests_waiting", tasks, "Other")
    if broker is None or found is None:
        return
    partitions = broker.partitions
    out.add("tidelog_requests_waiting", found.produces_waiting, "Produce")
    # A produce is itself what its deadline calls; everything else there is a consumer's fetch.
    deadlines = partitions.deadlines.waiting()
    fetches = sum(not isinstance(getattr(each, "__self__", None), Deferred) for each in deadlines)
    out.add("tidelog_requests_waiting", fetches, "FetchConsumer")
    followers = partitions.follower_fetches.sessions.values()
    out.add("tidelog_requests_waiting", sum(each.parked is not None for each in followers), "FetchFollower")
    consumers = list(partitions.fetch_sessions)
    out.add("tidelog_fetch_sessions", len(consumers), CONSUMERS)
    out.add("tidelog_fetch_session_partitions", sum(len(each.partitions) for each in consumers), CONSUMERS)
    out.add("tidelog_fetch_session_evictions_total", partitions.fetch_sessions.evictions)
    out.add("tidelog_fetch_sessions", len(followers), FOLLOWERS)
    out.add("tidelog_fetch_session_partitions", sum(len(each.entries) for each in followers), FOLLOWERS)


def tell_groups(broker: BrokerSide, out: Exposition) -> None:
    states = dict.fromkeys(_GROUP_STATES, 0)
    try:
        for group in broker.groups.list_groups((), ()):
            states[group.group_state] = states.get(group.group_state, 0) + 1
    except KafkaError:
        return  # some are being loaded: what is known now would look as if the others had gone
    for state, count in states.items():
        out.add("tidelog_groups", count, state)
    lags, are_all = broker.groups.lags(LAGS_SHOWN_MAX)
    for group_id, topic, partition, lag_records in lags:
        out.add("tidelog_group_lag_records", lag_records, group_id, topic, str(partition))
    out.add("tidelog_group_lag_series_left_out", not are_all)
