"""DeleteGroups (key 42, versions 0-2): groups without members, with all that they have committed.

A group named twice is answered once. Each is answered by the coordinator of its partition, once that is committed.
"""

from __future__ import annotations

from functools import partial

from tidelog.broker.request import Deferred, RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.delete_groups import DeletableGroupResult, DeleteGroupsRequest, DeleteGroupsResponse

REQUEST = DeleteGroupsRequest


def handle(
    services: Services, context: RequestContext, request: DeleteGroupsRequest
) -> DeleteGroupsResponse | Deferred:
    answer = _Answer(list(dict.fromkeys(request.groups_names)))
    for index, group_id in enumerate(answer.groups):
        found: DeletableGroupResult | Deferred | KafkaError
        try:
            found = services.groups.delete_group(context, group_id)
        except KafkaError as error:
            found = error
        if isinstance(found, Deferred):
            found.on_complete(partial(answer.arrived, index))
        else:
            answer.arrived(index, found)
    if answer.missing == 0:
        return answer.response()
    answer.deferred = Deferred()
    return answer.deferred


def refuse(request: DeleteGroupsRequest, error: KafkaError, version: int) -> DeleteGroupsResponse:
    groups = dict.fromkeys(request.groups_names)
    return DeleteGroupsResponse(
        results=[DeletableGroupResult(group_id=group_id, error_code=error.code) for group_id in groups]
    )


class _Answer:
    """Gathers what the groups' coordinators say."""

    def __init__(self, groups: list[str]) -> None:
        self.groups = groups
        self.missing = len(groups)
        self.deferred: Deferred | None = None
        self._results = [DeletableGroupResult(group_id=group_id) for group_id in groups]

    def arrived(self, index: int, found: DeletableGroupResult | KafkaError) -> None:
        self._results[index].error_code = found.code if isinstance(found, KafkaError) else found.error_code
        self.missing -= 1
        if self.missing == 0 and self.deferred is not None:
            self.deferred.complete(self.response())

    def response(self) -> DeleteGroupsResponse:
        return DeleteGroupsResponse(results=self._results)
