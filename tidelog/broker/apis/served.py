"""Which API each kind of listener serves: the handler modules, as tables. `protocol.api` says what is advertised.

Produce and Fetch of records are not here: they are wired into dispatch, on the brokers' listeners only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from tidelog.broker.apis import (
    add_raft_voter,
    allocate_producer_ids,
    alter_partition,
    assign_replicas_to_dirs,
    begin_quorum_epoch,
    broker_registration,
    controller_registration,
    describe_quorum,
    end_quorum_epoch,
    fetch_snapshot,
    list_partition_reassignments,
    raft_fetch,
    remove_raft_voter,
    unregister_broker,
    update_features,
    update_raft_voter,
    vote,
)
from tidelog.broker.apis.cluster import (
    alter_partition_reassignments,
    alter_replica_log_dirs,
    api_versions,
    broker_heartbeat,
    describe_cluster,
    describe_log_dirs,
    describe_topic_partitions,
    elect_leaders,
    envelope,
    find_coordinator,
    get_telemetry_subscriptions,
    metadata,
    push_telemetry,
)
from tidelog.broker.apis.groups import (
    delete_groups,
    describe_groups,
    heartbeat,
    join_group,
    leave_group,
    list_groups,
    offset_commit,
    offset_delete,
    offset_fetch,
    sync_group,
)
from tidelog.broker.apis.records import (
    delete_records,
    describe_producers,
    init_producer_id,
    list_offsets,
    offset_for_leader_epoch,
)
from tidelog.broker.apis.topics import (
    alter_configs,
    create_partitions,
    create_topics,
    delete_topics,
    describe_configs,
    incremental_alter_configs,
    list_config_resources,
)

# Answered by the active controller alone: brokers send them on to it (Kafka's forwardToController).
_FORWARDED_APIS: Final[tuple[ModuleType, ...]] = (
    add_raft_voter,
    alter_configs,
    alter_partition_reassignments,
    create_partitions,
    create_topics,
    delete_topics,
    describe_quorum,
    elect_leaders,
    incremental_alter_configs,
    list_partition_reassignments,
    remove_raft_voter,
    unregister_broker,
    update_features,
)
FORWARDED: Final = frozenset(module.REQUEST.API_KEY for module in _FORWARDED_APIS)

BROKER_APIS: Final[tuple[ModuleType, ...]] = (
    *_FORWARDED_APIS,
    alter_replica_log_dirs,
    api_versions,
    delete_groups,
    delete_records,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_producers,
    describe_topic_partitions,
    find_coordinator,
    get_telemetry_subscriptions,
    heartbeat,
    init_producer_id,
    join_group,
    leave_group,
    list_config_resources,
    list_groups,
    list_offsets,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    push_telemetry,
    sync_group,
)

CONTROLLER_APIS: Final[tuple[ModuleType, ...]] = (
    *_FORWARDED_APIS,
    allocate_producer_ids,
    alter_partition,
    api_versions,
    assign_replicas_to_dirs,
    begin_quorum_epoch,
    broker_heartbeat,
    broker_registration,
    controller_registration,
    describe_cluster,
    describe_configs,
    end_quorum_epoch,
    envelope,
    fetch_snapshot,
    raft_fetch,
    update_raft_voter,
    vote,
)
