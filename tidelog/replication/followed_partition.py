"""The state of one partition in a link to its leader: its last request, and whether the fetch session has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

NOT_REQUESTED: Final = 1 << 62

Key = tuple[bytes, int]


class FollowedPartition:
    """One partition in a link. `request_number`: that of the request that last mentioned it.

    `requested_offset`: the fetch offset in it. `leader_high_watermark`: from the leader's last response, or -1.
    """

    __slots__ = (
        "failures", "in_session", "key", "leader_epoch", "leader_high_watermark", "log", "partition", "request_number",
        "requested_offset",
    )  # fmt: skip

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.log = partition.log
        self.key: Key = (partition.topic_id, partition.index)
        self.leader_epoch = partition.leader_epoch
        self.request_number = NOT_REQUESTED
        self.requested_offset = -1
        self.in_session = False
        self.failures = 0
        self.leader_high_watermark = -1
