"""The names of the partitions' directories in a log directory, as in Kafka. Pure.

`topic-0` is the present log, `topic-0.<id>-future` is a copy that moves here from another log directory,
`topic-0.<id>-delete` waits for its removal, `topic-0.<id>-stray` is kept although the metadata does not assign it here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

DELETE_SUFFIX: Final = "-delete"
STRAY_SUFFIX: Final = "-stray"
FUTURE_SUFFIX: Final = "-future"
NAME_LENGTH_MAX: Final = 255

_PARTITION: Final = re.compile(r"^(?P<topic>.+)-(?P<partition>\d{1,10})$")
_FUTURE: Final = re.compile(r"^(?P<topic>.+)-(?P<partition>\d{1,10})\.[0-9a-f]{32}-future$")
_AWAY: Final = re.compile(r"^(?P<topic>.+)-(?P<partition>\d{1,10})\.[0-9a-f]{32}-(?:delete|stray)$")

TopicPartition = tuple[str, int]


def parse_name(name: str) -> TopicPartition | None:
    match = _PARTITION.match(name)
    return (match["topic"], int(match["partition"])) if match else None


def parse_future_name(name: str) -> TopicPartition | None:
    match = _FUTURE.match(name)
    return (match["topic"], int(match["partition"])) if match else None


def away_names(names: Iterable[str]) -> set[TopicPartition]:
    """What `is_away` takes: the topics and partitions in the names of logs that are deleted or set aside."""
    matches = (_AWAY.match(name) for name in names)
    return {(match["topic"], int(match["partition"])) for match in matches if match}


def is_away(topic: str, partition: int, names: Collection[TopicPartition]) -> bool:
    """Whether a log of this partition is among the `away_names`, which have long topic names shortened."""
    suffixes = (f"-{partition}.{'0' * 32}{kind}" for kind in (DELETE_SUFFIX, STRAY_SUFFIX))
    return any((topic[: NAME_LENGTH_MAX - len(suffix)], partition) in names for suffix in suffixes)


def future_name(topic: str, partition: int, unique: bytes) -> str:
    """The name of a future log. For a long topic it exceeds NAME_LENGTH_MAX, and no future log is possible."""
    return f"{topic}-{partition}.{unique.hex()}{FUTURE_SUFFIX}"


def away_name(topic: str, partition: int, unique: bytes, kind: str) -> str:
    """The name of a log that is deleted or set aside. A long topic name is shortened."""
    suffix = f"-{partition}.{unique.hex()}{kind}"
    return topic[: NAME_LENGTH_MAX - len(suffix)] + suffix
