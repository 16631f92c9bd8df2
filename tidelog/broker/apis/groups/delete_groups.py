"""DeleteGroups (key 42, versions 0-2): deletes groups without members, with their committed offsets.

A duplicate group gets one answer. The coordinator of the group's partition answers after the deletion is committed.
"""

from __future__ import annotations

from functools import partial

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext, gather
from tidelog.broker.scheduling.pieces import Arrays
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse

REQUEST = DeleteGroupsRequest
# Each group is a write of its own, with a record for each of its offsets; ids of few letters make a small request.
IN_PIECES = Arrays("groups_names", "results", piece_elements=25, whole_bytes_max=256)


def check(request: DeleteGroupsRequest) -> None:
    request.groups_names = list(dict.fromkeys(request.groups_names))


def handle(
    services: Services, context: RequestContext, request: DeleteGroupsRequest
) -> DeleteGroupsResponse | Deferred:
    groups = list(dict.fromkeys(request.groups_names))

    def response(results: list[DeletableGroupResult | KafkaError]) -> DeleteGroupsResponse:
        return DeleteGroupsResponse(
            results=[
                DeletableGroupResult(
                    group_id=group_id, error_code=each.code if isinstance(each, KafkaError) else each.error_code
                )
                for group_id, each in zip(groups, results)
            ]
        )

    return gather([partial(services.groups.delete_group, context, group_id) for group_id in groups], response)


def refuse(request: DeleteGroupsRequest, error: KafkaError, version: int) -> DeleteGroupsResponse:
    groups = dict.fromkeys(request.groups_names)
    return DeleteGroupsResponse(
        results=[DeletableGroupResult(group_id=group_id, error_code=error.code) for group_id in groups]
    )
