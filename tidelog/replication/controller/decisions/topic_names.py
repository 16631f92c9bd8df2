"""The rules for topic names (org.apache.kafka.common.internals.Topic), for broker and controller."""

from __future__ import annotations

import re
from typing import Final

MAX_LENGTH: Final = 249  # a directory's name has at most 255: the partition and a suffix are added
METADATA_TOPIC: Final = "__cluster_metadata"

_LEGAL = re.compile(r"[a-zA-Z0-9._-]+")


def topic_name_problem(name: str) -> str | None:
    """The error message of an invalid name, in Kafka's words, or None."""
    problem: str | None = None
    if not name:
        problem = "the empty string is not allowed"
    elif name in (".", ".."):
        problem = f"'{name}' is not allowed"
    elif len(name) > MAX_LENGTH:
        problem = f"the length of '{name}' is longer than the max allowed length {MAX_LENGTH}"
    elif _LEGAL.fullmatch(name) is None:
        problem = f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
    return None if problem is None else f"Topic name is invalid: {problem}"


def may_collide(name: str) -> bool:
    """Whether another topic could have the same metric name, in which '.' becomes '_'."""
    return "." in name or "_" in name


def collision_key(name: str) -> str:
    return name.replace(".", "_")
