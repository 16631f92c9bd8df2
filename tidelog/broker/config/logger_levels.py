"""The levels of this process's loggers: reading and changing them at run time (KIP-412).

Changes are not persistent: a restart begins with the configured levels. Kafka's names of levels are
mapped to Python's. The names of loggers are Tidelog's; all loggers inherit from `root`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer
from tidelog.replication.controller.decisions.config_changes import Operation

logger = logging.getLogger("tidelog.config")

ROOT: Final = "root"
TRACE: Final = 5  # below DEBUG, where Python has no name of its own
_LEVELS: Final = {
    "DEBUG": logging.DEBUG,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
    "INFO": logging.INFO,
    "TRACE": TRACE,
    "WARN": logging.WARNING,
}
_REFUSED_OPERATIONS: Final = {int(operation): operation.name for operation in (Operation.APPEND, Operation.SUBTRACT)}


def levels() -> Iterator[tuple[str, str]]:
    """(logger, its effective level), root first."""
    for name in (ROOT, *_names()):
        yield name, _name_of(_logger(name).getEffectiveLevel())


def alter(node_id: int, resource: Any, *, validate_only: bool) -> None:
    """Apply all changes of a BROKER_LOGGER resource of IncrementalAlterConfigs, or none. Raises
    KafkaError.
    """
    _check_node(node_id, resource.resource_name)
    logger_names = {ROOT, *_names()}
    for change in resource.configs:
        _check(change, logger_names)
    if validate_only:
        return
    for change in resource.configs:
        if change.config_operation == Operation.SET:
            _logger(change.name).setLevel(_LEVELS[change.value])
            logger.warning("the level of logger %s is now %s", change.name, change.value)
        else:
            _logger(change.name).setLevel(logging.NOTSET)
            logger.warning("logger %s no longer has a level of its own", change.name)


def _check_node(node_id: int, name: str) -> None:
    try:
        is_own = parse_integer(name) == node_id
    except ValueError:
        message = f"Node id must be an integer, but it is: {name}"
        raise KafkaError(ErrorCode.INVALID_REQUEST, message) from None
    if not is_own:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unexpected node id. Expected {node_id}, but received {name}")


def _check(change: Any, logger_names: set[str]) -> None:
    operation = change.config_operation
    if operation not in (Operation.SET, Operation.DELETE):
        kind = _REFUSED_OPERATIONS.get(operation, f"Unknown operation type {operation}")
        noun = " operation" if operation in _REFUSED_OPERATIONS else ""
        message = f"{kind}{noun} is not allowed for the BROKER_LOGGER resource"
        raise KafkaError(ErrorCode.INVALID_REQUEST, message)
    if change.name not in logger_names:
        raise KafkaError(ErrorCode.INVALID_CONFIG, f"Logger {change.name} does not exist!")
    if operation == Operation.SET and change.value not in _LEVELS:
        raise KafkaError(
            ErrorCode.INVALID_CONFIG,
            f"Cannot set the log level of {change.name} to {change.value} as it is not a supported log level. "
            f"Valid log levels are {', '.join(_LEVELS)}",
        )
    if operation == Operation.DELETE and change.name == ROOT:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Removing the log level of the {ROOT} logger is not allowed")


def _names() -> list[str]:
    """Ours, and asyncio's, which tells of callbacks that take too long."""
    return sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] in ("asyncio", "tidelog"))


def _logger(name: str) -> logging.Logger:
    return logging.getLogger(None if name == ROOT else name)


def _name_of(level: int) -> str:
    """The nearest that is not more talkative."""
    fitting = [(number, name) for name, number in _LEVELS.items() if number >= level]
    return min(fitting)[1] if fitting else "FATAL"
