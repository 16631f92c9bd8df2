"""What the directories of partitions are called in a log directory; Kafka's names. Pure.

`topic-0` is served, `topic-0.<id>-future` is on its way from another log directory, `topic-0.<id>-delete` waits to be
removed, `topic-0.<id>-stray` is kept although the metadata does not place it here.
"""

from __future__ import annotations

import re
from typing import Final

DELETE_SUFFIX: Final = "-delete"
STRAY_SUFFIX: Final = "-stray"
FUTURE_SUFFIX: Final = "-future"
NAME_LENGTH_MAX: Final = 255

_PARTITION: Final = re.compile(r"^(?P<topic>.+)-(?P<partition>\d{1,10})$")
_FUTURE: Final = re.compile(r"^(?P<topic>.+)-(?P<partition>\d{1,10})\.[0-9a-f]{32}-future$")

TopicPartition = tuple[str, int]


def parse_name(name: str) -> TopicPartition | None:
    match = _PARTITION.match(name)
    return (match["topic"], int(match["partition"])) if match else None


def parse_future_name(name: str) -> TopicPartition | None:
    match = _FUTURE.match(name)
    return (match["topic"], int(match["partition"])) if match else None


def future_name(topic: str, partition: int, unique: bytes) -> str:
    """Longer than NAME_LENGTH_MAX for a long topic: then there can be none."""
    return f"{topic}-{partition}.{unique.hex()}{FUTURE_SUFFIX}"


def away_name(topic: str, partition: int, unique: bytes, kind: str) -> str:
    """For one that goes; of a long topic only the beginning is kept."""
    suffix = f"-{partition}.{unique.hex()}{kind}"
    return topic[: NAME_LENGTH_MAX - len(suffix)] + suffix
