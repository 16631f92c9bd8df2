"""DescribeGroups (key 15, versions 0-6): state, protocol and members of groups.

Each group has an answer of its own: a group whose partition is on another broker or is loading has that error, other
groups have their members. An unknown group has the state Dead, and from version 6 on also GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import made
from tidelog.broker.scheduling.pieces import ID_CHARACTERS, Arrays
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_groups import DescribedGroup, DescribeGroupsRequest, DescribeGroupsResponse

REQUEST = DescribeGroupsRequest
# The bytes of a member's metadata and assignment that count as much as another member.
MEMBER_BYTES = 100


def _size(response: DescribeGroupsResponse) -> int:
    count = 0
    for group in response.groups:
        count += len(group.group_id) // ID_CHARACTERS
        for member in group.members:
            count += 1 + (len(member.member_metadata) + len(member.member_assignment)) // MEMBER_BYTES
    return count


IN_PIECES = Arrays("groups", "groups", response_elements=_size)


def check(request: DescribeGroupsRequest) -> None:
    check_repeats(request.groups)


def handle(services: Services, context: RequestContext, request: DescribeGroupsRequest) -> DescribeGroupsResponse:
    check_repeats(request.groups)
    groups = services.groups.describe_groups(request.groups, context.api_version)
    if request.include_authorized_operations:
        for group in groups:
            if group.error_code == ErrorCode.NONE:
                group.authorized_operations = authorized_operations.GROUP
    return DescribeGroupsResponse(groups=groups)


def refuse(request: DescribeGroupsRequest, error: KafkaError, version: int) -> DescribeGroupsResponse:
    return DescribeGroupsResponse(
        groups=made(request.groups, lambda group_id: DescribedGroup(group_id=group_id, error_code=error.code))
    )
