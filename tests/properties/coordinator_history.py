"""What the random histories of a group coordinator share: topic "t", which is deleted and made anew, the log of its
partition, and the replicas and appends behind that.
"""

from __future__ import annotations

from random import Random

from tests.unit.broker.coordinators.fakes import World
from tidelog.protocol.errors import ErrorCode, KafkaError


class CoordinatorHistory:
    """The base of a history. A subclass chooses the steps."""

    def __init__(self, choice: Random, world: World) -> None:
        self.choice = choice
        self.world = world
        self.topic_number = 1
        self.has_moved = False

    @property
    def topic_id(self) -> bytes:
        return bytes([self.topic_number]) * 16

    @property
    def end_offset(self) -> int:
        return self.world.ports.end_offsets.get(0, 0)

    def make_anew(self) -> None:
        former = self.topic_id
        self.topic_number += 1
        self.world.service.on_topics_deleted([("t", former)])

    def replicate(self) -> None:
        low = self.world.ports.high_watermarks.get(0, 0)
        self.world.ports.commit(0, self.choice.choice((self.end_offset, self.choice.randint(low, self.end_offset))))

    def refuse_or_take(self) -> None:
        is_refusing = self.world.ports.refuse_appends is not None
        self.world.ports.refuse_appends = None if is_refusing else KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS)
