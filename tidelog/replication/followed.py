"""One partition as a link to its leader fetches it: which request mentioned it last, and whether the session has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

NOT_ASKED: Final = 1 << 62

Key = tuple[bytes, int]


class Followed:
    """One partition as this link fetches it. `asked`: the number of the request that last mentioned it.

    `leader_high_watermark` is what the leader last said of it; -1 nothing yet.
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
