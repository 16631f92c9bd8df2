"""The state of one partition in a link to its leader: its last request, and whether the fetch session has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

NOT_ASKED: Final = 1 << 62

Key = tuple[bytes, int]


class FollowedPartition:
    """One partition in a link. `asked`: the number of the request that last mentioned it.

    `asked_offset`: the fetch offset in that request. `leader_high_watermark`: from the leader's last response, or -1.
    """

    __slots__ = (
        "asked", "asked_offset", "failures", "in_session", "key", "leader_epoch", "leader_high_watermark", "log",
        "partition",
    )  # fmt: skip

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.log = partition.log
        self.key: Key = (partition.topic_id, partition.index)
        self.leader_epoch = partition.leader_epoch
        self.asked = NOT_ASKED
        self.asked_offset = -1
        self.in_session = False
        self.failures = 0
        self.leader_high_watermark = -1
