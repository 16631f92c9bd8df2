"""The error for a position that the log no longer contains (Java's `LogTruncationException`).

Pure.
"""

from __future__ import annotations

from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError


class LogTruncation(KafkaError):
    """An unclean election removed records before the position, and `auto_offset_reset` is none.

    `divergent_offset` is the first offset at which the leader's log is known to differ, None when
    it is unknown. `seek` to it, or to another offset, to continue. The code is OFFSET_OUT_OF_RANGE,
    as for a position beyond the log.
    """

    def __init__(
        self, partition: TopicPartition, position: OffsetAndMetadata, divergent_offset: OffsetAndMetadata | None
    ) -> None:
        where = "at an offset that cannot be told" if divergent_offset is None else f"from {divergent_offset.offset} on"
        super().__init__(
            ErrorCode.OFFSET_OUT_OF_RANGE,
            f"{partition}: the log differs {where} from what was read up to {position.offset} in leader epoch "
            f"{position.leader_epoch}, auto_offset_reset=none",
        )
        self.partition = partition
        self.position = position
        self.divergent_offset = divergent_offset
