"""The node's log on standard error: one line for each event, as text or JSON, with a limit for repeated lines.

Only `tidelog start` sets it up; a program that embeds a node configures its own logging. Of repeated events (the same
call in the code, with any arguments) a few are logged per window and the others are counted. Invariant: an event is one
line, which has a bound. Control characters, for instance in names that clients chose, are written as escapes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig

# At most REPEATS_MAX lines of one kind in WINDOW_S. Lines of level DEBUG have no limit.
REPEATS_MAX = 20
WINDOW_S = 10.0
# The characters of an event's text, and of its traceback, of which the end is kept. They may repeat a client's text.
TEXT_CHARACTERS_MAX = 16_384
# The number of kinds that are counted. Beyond it the oldest window is dropped.
KINDS_MAX = 1000

# A single node elects itself and registers with itself. Its first line is the one that says it is ready.
_QUIET_ALONE = ("tidelog.controller", "tidelog.lifecycle", "tidelog.quorum")

_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_ESCAPES |= {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def set_up(config: NodeConfig, stream: TextIO) -> None:
    """Log to `stream` with the configured level and format. Replaces an earlier setup."""
    handler = LineHandler(stream)
    handler.setFormatter(JsonLines(config.node_id) if config.text("log.format") == "json" else TextLines())
    logging.basicConfig(level=config.text("log.level").upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    if config.is_alone and not config.is_set("log.level"):
        for name in _QUIET_ALONE:
            logging.getLogger(name).setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING tidelog.server: what has happened`"""

    def format(self, record: logging.LogRecord) -> str:
        text = _text(record)
        trace = _trace(record)
        if trace:
            text = f"{text}\n{trace}"
        line = f"{_time(record)} {record.levelname} {record.name}: {text.translate(_ESCAPES)}"
        left_out = getattr(record, "left_out", 0)
        return f"{line} ({left_out} more like this left out)" if left_out else line


class JsonLines(logging.Formatter):
    """A JSON object with time, level, logger, node_id, message, and if they apply exception and left_out."""

    def __init__(self, node_id: int) -> None:
        super().__init__()
        import json  # imported late, because most nodes write text

        self._encode = json.dumps
        self._node_id = node_id

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "node_id": self._node_id,
            "message": _text(record),
        }
        trace = _trace(record)
        if trace:
            event["exception"] = trace
        left_out = getattr(record, "left_out", 0)
        if left_out:
            event["left_out"] = left_out
        return self._encode(event)


def _time(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


def _text(record: logging.LogRecord) -> str:
    text = record.getMessage()
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[:TEXT_CHARACTERS_MAX] + "..."


_PLAIN = logging.Formatter()


def _trace(record: logging.LogRecord) -> str:
    trace = ""
    if record.exc_info:
        trace = _PLAIN.formatException(record.exc_info)
    if record.stack_info:
        trace = f"{trace}\n{_PLAIN.formatStack(record.stack_info)}"
    trace = trace.strip("\n")
    return trace if len(trace) <= TEXT_CHARACTERS_MAX else "..." + trace[-TEXT_CHARACTERS_MAX:]


class _Kind:
    """The lines of one kind in its current window."""

    __slots__ = ("began_s", "last", "left_out", "passed")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.passed = 0
        self.left_out = 0
        self.last: logging.LogRecord | None = None


class RepeatLimit:
    """Decides which records are logged, by their times. `due` returns the records that count the omitted ones."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, int, object], _Kind] = {}  # in the order of their windows

    def passes(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        key = (record.name, record.levelno, record.msg if isinstance(record.msg, str) else type(record.msg))
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[key] = _Kind(record.created)
        if kind.passed < REPEATS_MAX:
            kind.passed += 1
            return True
        kind.left_out += 1
        kind.last = record
        return False

    def due(self, now_s: float) -> Iterator[logging.LogRecord]:
        """The last omitted record of each kind whose window is over, with the number of other omitted ones."""
        while self._kinds:
            key = next(iter(self._kinds))
            kind = self._kinds[key]
            if 0 <= now_s - kind.began_s < WINDOW_S:
                return
            del self._kinds[key]
            if kind.last is not None:
                kind.last.left_out = kind.left_out - 1
                yield kind.last


class LineHandler(logging.StreamHandler[TextIO]):
    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._limit = RepeatLimit()

    def emit(self, record: logging.LogRecord) -> None:
        for left_out in self._limit.due(record.created):
            super().emit(left_out)
        if self._limit.passes(record):
            super().emit(record)

    def close(self) -> None:
        for left_out in self._limit.due(float("inf")):
            super().emit(left_out)
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a record that cannot be formatted or written, for instance because standard error is closed."""
