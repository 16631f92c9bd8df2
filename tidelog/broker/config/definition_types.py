"""The definition of a configuration key: type, validator, update mode. The tables
beside this file list the keys.

Values are stored and sent as text, as in Kafka. `ConfigDefinition.parse` turns text into a typed
Python value, or raises `ConfigError` with the message of Kafka's `ConfigException`. This module
does not depend on files, nodes or topics.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tidelog.protocol.errors import ConfigError
from tidelog.protocol.java_text import parse_double, parse_integer, print_double, split_list, trim

# The types, numbered as DescribeConfigs reports them
# (org.apache.kafka.clients.admin.ConfigEntry.ConfigType).
BOOLEAN, STRING, INT, SHORT, LONG, DOUBLE, LIST, CLASS, PASSWORD = range(1, 10)
TYPE_NAMES = ("UNKNOWN", "BOOLEAN", "STRING", "INT", "SHORT", "LONG", "DOUBLE", "LIST", "CLASS", "PASSWORD")

# When a key may change. INTERNAL keys are read-only, and DescribeConfigs lists them only if they are set.
READ_ONLY = "read-only"
CLUSTER_WIDE = "cluster-wide"
PER_BROKER = "per-broker"
INTERNAL = "internal"
TOPIC = "topic"
GROUP = "group"
METRICS = "metrics subscription"

LISTENER_PREFIX = "listener.name."

Validator = Callable[[str, Any], str | None]
"""(name, typed value) -> the problem, or None. A text that starts with one of `_WHOLE` is the whole message."""

_THROTTLED = re.compile(r"[0-9]+:[0-9]+")
_WHOLE = ("Configuration ", "Invalid value ")
_AGO = re.compile(r"by_duration:P(?=.)(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?", re.IGNORECASE)

Row = tuple[str, int, str | None, Validator, str, str]


_BITS = {SHORT: 16, INT: 32, LONG: 64}


def parse_value(name: str, kind: int, text: str) -> Any:
    """Parse text as the key's type, with the errors of Kafka's `ConfigDef.parseType`."""
    trimmed = trim(text)
    if kind == BOOLEAN:
        lowered = trimmed.lower()
        if lowered in ("true", "false"):
            return lowered == "true"
        raise ConfigError(f"Invalid value {text} for configuration {name}: Expected value to be either true or false")
    if kind in _BITS or kind == DOUBLE:
        try:
            return parse_integer(trimmed, _BITS[kind]) if kind in _BITS else parse_double(trimmed)
        except ValueError:
            message = f"Invalid value {text} for configuration {name}: Not a number of type {TYPE_NAMES[kind]}"
            raise ConfigError(message) from None
    if kind == LIST:
        return split_list(trimmed)
    return trimmed


def _printed(value: Any) -> str:
    """The value as Java prints it."""
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return print_double(value) if isinstance(value, float) else str(value)


class ConfigDefinition(NamedTuple):
    """One key. `default` is text, or None if Kafka has no default."""

    name: str
    type: int
    default: str | None
    validator: Validator
    update_mode: str
    documentation: str

    def parse(self, text: str | None) -> Any:
        """The typed value. Raises `ConfigError`."""
        if text is None:
            return None
        value = parse_value(self.name, self.type, text)
        problem = self.validator(self.name, value)
        if problem is None:
            return value
        if problem.startswith(_WHOLE):
            raise ConfigError(problem)
        raise ConfigError(f"Invalid value {_printed(value)} for configuration {self.name}: {problem}")

    @property
    def changes_at_run_time(self) -> bool:
        """Whether a broker key may change while the node runs, for all brokers or for one."""
        return self.update_mode in (CLUSTER_WIDE, PER_BROKER)

    @property
    def is_sensitive(self) -> bool:
        return self.type == PASSWORD


class TypedValues:
    """Typed access to `self[name]`, which subclasses define. AssertionError for a value of another type."""

    def __getitem__(self, name: str) -> Any:
        raise NotImplementedError

    def integer(self, name: str) -> int:
        value = self[name]
        assert isinstance(value, int), f"{name} is not an integer"
        return value

    def number(self, name: str) -> float:
        return float(self[name])

    def flag(self, name: str) -> bool:
        value = self[name]
        assert isinstance(value, bool), f"{name} is not a boolean"
        return value

    def text(self, name: str) -> str:
        """The value as text, empty without a value."""
        value = self[name]
        return "" if value is None else str(value)

    def items(self, name: str) -> list[str]:
        value = self[name]
        return [] if value is None else list(value)


def table(*parts: tuple[Row, ...]) -> dict[str, ConfigDefinition]:
    """The definitions of the rows, by name."""
    return {row[0]: ConfigDefinition(*row) for part in parts for row in part}


def base_name(name: str) -> str:
    """The base key of a listener's key (`listener.name.<listener>.<key>`); other keys are
    unchanged.
    """
    if not name.startswith(LISTENER_PREFIX):
        return name
    return name[len(LISTENER_PREFIX) :].partition(".")[2]


def ANY(name: str, value: Any) -> str | None:
    return None


def NON_EMPTY(name: str, value: str) -> str | None:
    return "String must be non-empty" if not value else None


def DISTINCT(name: str, value: list[str]) -> str | None:
    if len(set(value)) != len(value):
        return f"Configuration '{name}' values must not be duplicated."
    if "" in value:
        return f"Configuration '{name}' values must not be empty."
    return None


def NO_EMPTY_ITEMS(name: str, value: list[str]) -> str | None:
    return f"Configuration '{name}' values must not be empty." if "" in value else None


def at_least(minimum: float) -> Validator:
    def check(name: str, value: Any) -> str | None:
        return f"Value must be at least {minimum}" if value < minimum else None

    return check


def between(minimum: float, maximum: float, also: float | None = None) -> Validator:
    def check(name: str, value: Any) -> str | None:
        if value == also:
            return None
        if also is not None and not minimum <= value <= maximum:
            return f"Value must be between {minimum} and {maximum} or equal to {also}"
        if value < minimum:
            return f"Value must be at least {minimum}"
        return f"Value must be no more than {maximum}" if value > maximum else None

    return check


def one_of(*allowed: str, any_case: bool = False) -> Validator:
    folded = {item.upper() for item in allowed}

    def check(name: str, value: str) -> str | None:
        if any_case:
            if value.upper() in folded:
                return None
            return f"String must be one of (case insensitive): {', '.join(allowed)}"
        return None if value in allowed else f"String must be one of: {', '.join(allowed)}"

    return check


def list_of(*allowed: str) -> Validator:
    def check(name: str, value: list[str]) -> str | None:
        for item in value:  # duplicates are accepted, as in Kafka
            if not item:
                return f"Configuration '{name}' values must not be empty."
            if item not in allowed:
                return f"Invalid value {item} for configuration {name}: String must be one of: {', '.join(allowed)}"
        return None

    return check


def THROTTLED_REPLICAS(name: str, value: list[str]) -> str | None:
    """`partition:broker,...` or `*` (Kafka's ThrottledReplicaListValidator)."""
    if value == ["*"]:
        return None
    for item in value:
        if _THROTTLED.fullmatch(item) is None:
            return (
                f"{name} must be the literal '*' or a list of replicas in the following format: "
                "[partitionId]:[brokerId],[partitionId]:[brokerId],..."
            )
    return None


def AUTO_OFFSET_RESET(name: str, value: str) -> str | None:
    if value in ("latest", "earliest") or _AGO.fullmatch(value) is not None:
        return None
    return (
        f"Invalid value {value} for configuration {name}: Invalid value `{value}` for configuration {name}. "
        "The value must be either 'earliest', 'latest' or of the format 'by_duration:<PnDTnHnMn.nS>'."
    )
