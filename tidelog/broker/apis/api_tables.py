"""The tables of APIs for each kind of listener: handler modules and rows of `delegated`.

`protocol.api` lists the advertised APIs. Produce and Fetch of records are not here: `dispatch` handles them directly,
on the brokers' listeners only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

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
    metadata,
)
from tidelog.broker.apis.delegated import CONTROLLER_ROWS, FORWARDED_ROWS, DelegatedApi
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
    txn_offset_commit,
)
from tidelog.broker.apis.records import (
    delete_records,
    describe_producers,
    init_producer_id,
    list_offsets,
    offset_for_leader_epoch,
    write_txn_markers,
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
from tidelog.broker.apis.transactions import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    describe_transactions,
    end_txn,
    list_transactions,
)

# A module with REQUEST, handle() and refuse(), or a row that has them.
Api = ModuleType | DelegatedApi[Any]

# Only the active controller handles these; brokers forward them to it (Kafka's forwardToController).
_FORWARDED_APIS: Final[tuple[Api, ...]] = (
    *FORWARDED_ROWS,
    alter_configs,
    alter_partition_reassignments,
    create_partitions,
    create_topics,
    delete_topics,
    elect_leaders,
    incremental_alter_configs,
)
FORWARDED: Final = frozenset(api.REQUEST.API_KEY for api in _FORWARDED_APIS)

BROKER_APIS: Final[tuple[Api, ...]] = (
    *_FORWARDED_APIS,
    add_offsets_to_txn,
    add_partitions_to_txn,
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
    describe_transactions,
    end_txn,
    find_coordinator,
    heartbeat,
    init_producer_id,
    join_group,
    leave_group,
    list_config_resources,
    list_groups,
    list_offsets,
    list_transactions,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    sync_group,
    txn_offset_commit,
    write_txn_markers,
)

CONTROLLER_APIS: Final[tuple[Api, ...]] = (
    *_FORWARDED_APIS,
    *CONTROLLER_ROWS,
    api_versions,
    broker_heartbeat,
    describe_cluster,
    describe_configs,
    envelope,
)
