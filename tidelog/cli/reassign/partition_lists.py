"""The JSON files of Kafka's partition tools: lists of partitions, and plans that give each its replicas. Pure.

The form for elections (kafka-leader-election) is `{"partitions": [{"topic": "t", "partition": 0}]}`. A plan
(kafka-reassign-partitions) has also `"replicas": [1, 2]` in each entry, and `"version": 1`. Its `"log_dirs"` are the
target directories of the replicas, or "any". This module also computes the throttles and the progress of a plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.client.model import PartitionReassignment, Replica, TopicDescription, TopicPartition
from tidelog.protocol.errors import counted

LEADER_THROTTLE = "leader.replication.throttled.replicas"
FOLLOWER_THROTTLE = "follower.replication.throttled.replicas"
LEADER_RATE = "leader.replication.throttled.rate"
FOLLOWER_RATE = "follower.replication.throttled.rate"

COMPLETE = "complete"
MOVING = "in progress"
MISSING = "no such partition"
ELSEWHERE = "not on these replicas"
IN_ANOTHER = "in another directory"
DOWN = "broker does not run"
UNANSWERED = "broker does not answer"

ANY_DIRECTORY = "any"

Plan = dict[TopicPartition, list[int]]
Directories = dict[Replica, str]


class ListError(ValueError):
    """A file that is no such list; the text describes the error."""


def partitions_in(text: str) -> list[TopicPartition]:
    """The partitions of a list. Raises ListError."""
    return list(_entries(text))


def plan_in(text: str) -> Plan:
    """The target replicas by partition. Raises ListError."""
    plan: Plan = {}
    for partition, entry in _entries(text).items():
        replicas = entry.get("replicas")
        if not isinstance(replicas, list) or not replicas or not all(type(each) is int for each in replicas):
            raise ListError(f"{partition}: replicas must be a list of broker ids")
        if len(set(replicas)) < len(replicas):
            raise ListError(f"{partition}: a broker is named twice in replicas")
        plan[partition] = replicas
    return plan


def directories_in(text: str) -> Directories:
    """The target directories by replica, without replicas that may be in any. Raises ListError."""
    plan = plan_in(text)
    directories: Directories = {}
    for partition, entry in _entries(text).items():
        paths = entry.get("log_dirs", [ANY_DIRECTORY] * len(plan[partition]))
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise ListError(f"{partition}: log_dirs must be a list of directories")
        if len(paths) != len(plan[partition]):
            raise ListError(
                f"{partition}: {counted(len(plan[partition]), 'replica')}, but {counted(len(paths), 'log_dir')}"
            )
        for broker, path in zip(plan[partition], paths):
            if path != ANY_DIRECTORY:
                directories[Replica(*partition, broker)] = path
    return directories


def entries_in(text: str, key: str, entry: str, kind: str) -> list[Any]:
    """The list under `key` in a file of Kafka's tools. `entry` and `kind`: the expected form, for the error message.
    Raises ListError.
    """
    try:
        document = json.loads(text)
    except RecursionError:
        raise ListError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise ListError(f"not JSON: {error}") from None
    entries = document.get(key) if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ListError(f'expected {{"{key}": [{entry}]}} with at least one {kind}')
    if document.get("version", 1) != 1:
        raise ListError(f"version {document['version']} is not known")
    return entries


def _entries(text: str) -> dict[TopicPartition, dict[str, Any]]:
    entries: dict[TopicPartition, dict[str, Any]] = {}
    for entry in entries_in(text, "partitions", "...", "partition"):
        topic, number = (entry.get("topic"), entry.get("partition")) if isinstance(entry, dict) else (None, None)
        if not isinstance(topic, str) or type(number) is not int:
            raise ListError(f"expected a topic and a partition, not {json.dumps(entry)}")
        partition = TopicPartition(topic, number)
        if partition in entries:
            raise ListError(f"{partition} is there twice")
        entries[partition] = entry
    return entries


def as_plan(replicas: Mapping[TopicPartition, Sequence[int]], directories: Directories | None = None) -> str:
    """The plan with these replicas, as one line of JSON. The user keeps it to undo a move."""
    known = directories or {}
    entries = [
        {
            "topic": topic,
            "partition": number,
            "replicas": list(brokers),
            "log_dirs": [known.get(Replica(topic, number, broker), ANY_DIRECTORY) for broker in brokers],
        }
        for (topic, number), brokers in sorted(replicas.items())
    ]
    return json.dumps({"version": 1, "partitions": entries}, separators=(",", ":"))


def current(topics: Mapping[str, TopicDescription]) -> dict[TopicPartition, tuple[int, ...]]:
    return {
        TopicPartition(name, each.partition): each.replicas
        for name, topic in topics.items()
        for each in topic.partitions
    }


# ----------------------------------------------------------------------------------------------------------- throttles


class Throttles(NamedTuple):
    """The throttled replicas, as topic configs, and the brokers that need a rate."""

    topics: dict[str, dict[str, str | None]]
    brokers: list[int]


def throttles(
    plan: Plan,
    assignment: Mapping[TopicPartition, tuple[int, ...]],
    moving: Mapping[TopicPartition, PartitionReassignment],
) -> Throttles:
    """The throttles of a plan. As in Kafka's tool, present replicas are throttled as leaders, new ones as followers.

    Also those of all moves under way: a topic has one list, and a new one must not set free what moves already.
    """
    moves = {
        partition: ([replica for replica in each.replicas if replica not in each.adding], list(each.adding))
        for partition, each in moving.items()
    }
    for partition, target in plan.items():
        held = moves[partition][0] if partition in moves else list(assignment[partition])
        moves[partition] = held, [replica for replica in target if replica not in held]
    sources: dict[str, set[tuple[int, int]]] = {}
    targets: dict[str, set[tuple[int, int]]] = {}
    for (topic, number), (held, coming) in moves.items():
        if coming:
            sources.setdefault(topic, set()).update((number, replica) for replica in held)
            targets.setdefault(topic, set()).update((number, replica) for replica in coming)
    topics: dict[str, dict[str, str | None]] = {
        topic: {LEADER_THROTTLE: _pairs(sources[topic]), FOLLOWER_THROTTLE: _pairs(targets[topic])} for topic in sources
    }
    pairs = [pair for each in (*sources.values(), *targets.values()) for pair in each]
    return Throttles(topics, sorted({replica for _, replica in pairs}))


def _pairs(replicas: set[tuple[int, int]]) -> str:
    return ",".join(f"{number}:{replica}" for number, replica in sorted(replicas))


# ------------------------------------------------------------------------------------------------------------- progress


def progress(
    plan: Plan,
    assignment: Mapping[TopicPartition, tuple[int, ...]],
    moving: Mapping[TopicPartition, PartitionReassignment],
) -> dict[TopicPartition, str]:
    """The state of each partition of a plan: one of the four constants above."""
    states: dict[TopicPartition, str] = {}
    for partition, target in plan.items():
        if partition in moving:
            states[partition] = MOVING
        elif partition not in assignment:
            states[partition] = MISSING
        else:
            states[partition] = COMPLETE if assignment[partition] == tuple(target) else ELSEWHERE
    return states
