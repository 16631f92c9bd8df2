"""ListGroups (key 16, versions 0-5): the groups that this broker coordinates; a client sends it to all brokers.

Version 4 filters by state, version 5 by type. While a partition is loading, the whole request gets
COORDINATOR_LOAD_IN_PROGRESS.
"""

from __future__ import annotations

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse

REQUEST = ListGroupsRequest
ANSWERS_MAY_BE_LARGE = True
refuse = refusing(ListGroupsResponse)


async def handle(services: Services, context: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    response = ListGroupsResponse()
    async with AnswerInPieces(services.scheduler, context.connection) as answer:
        await answer.add_elements(services.groups.group_count)  # the list of all is held, too
        for piece in services.groups.list_groups(request.states_filter, request.types_filter):
            response.groups += piece
            await answer.add_elements(PIECE_ELEMENTS_MAX)
    return response
