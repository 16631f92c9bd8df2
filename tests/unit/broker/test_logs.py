"""The node's log: one line an event whatever is in it, as text or JSON, and never a flood."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from tests.unit.broker.conftest import RunningNode, batch
from tests.unit.broker.test_node import fetch, produce
from tidelog.broker.config.node_config import NodeConfig
from tidelog.broker.logs import (
    KINDS_MAX,
    REPEATS_MAX,
    TEXT_CHARACTERS_MAX,
    WINDOW_S,
    JsonLines,
    LineHandler,
    RepeatLimit,
    TextLines,
    set_up,
)
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse
from tidelog.protocol.messages.produce import ProduceResponse


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was again afterwards."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logging.captureWarnings(False)
    logger.handlers[:], logger.level = handlers, level
    for name in ("tidelog.controller", "tidelog.lifecycle", "tidelog.quorum"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def record(message: str, *values: object, level: int = logging.WARNING, at_s: float = 0.0) -> logging.LogRecord:
    made = logging.LogRecord("tidelog.test", level, __file__, 1, message, values, None)
    made.created, made.msecs = at_s, 0
    return made


def test_a_line_of_text_says_when_how_bad_where_and_what():
    made = record("topic %s is gone", "t", at_s=1_800_000_000.25)
    made.msecs = 250
    assert TextLines().format(made) == "2027-01-15T08:00:00.250Z WARNING tidelog.test: topic t is gone"


@pytest.mark.parametrize("evil", ["a\nERROR forged", "a\r\x1b[2Jb", "\x85\u2028\x00"])
def test_nobody_can_write_a_line_of_their_own(evil: str):
    for formatter in (TextLines(), JsonLines(1)):
        line = formatter.format(record("client %s", evil))
        assert line.isprintable()
        assert len(line.splitlines()) == 1


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines(1)])
def test_a_line_has_a_bound_whatever_clients_name(formatter: logging.Formatter):
    """A JoinGroup whose reason has 90 MB wrote as much to the log, and held all others up for 0.6 s."""
    whole = formatter.format(record("%s", "r" * TEXT_CHARACTERS_MAX))
    assert "r" * TEXT_CHARACTERS_MAX in whole
    assert "..." not in whole
    cut = formatter.format(record("%s", "r" * (1 << 20)))
    assert "r" * TEXT_CHARACTERS_MAX + "..." in cut
    assert len(cut) <= len(whole) + 3
    made = record("it failed", level=logging.ERROR)
    error = ValueError("r" * (1 << 20) + " is the end")
    made.exc_info = (ValueError, error, None)
    failure = formatter.format(made)
    assert "is the end" in failure
    assert len(failure) <= len(whole) + 50


def test_a_failure_is_one_line_too():
    try:
        raise ValueError("broken")
    except ValueError as error:
        made = record("it failed", level=logging.ERROR)
        made.exc_info = (ValueError, error, error.__traceback__)
    text = TextLines().format(made)
    assert len(text.splitlines()) == 1
    assert text.endswith("ValueError: broken")
    event = json.loads(JsonLines(3).format(made))
    assert (event["message"], event["level"], event["node_id"]) == ("it failed", "ERROR", 3)
    assert event["exception"].splitlines()[-1] == "ValueError: broken"


def test_what_repeats_is_cut_and_counted():
    stream = io.StringIO()
    handler = LineHandler(stream)
    handler.setFormatter(TextLines())
    for number in range(REPEATS_MAX + 100):
        handler.emit(record("refused %d", number))
        handler.emit(record("each one", level=logging.DEBUG))
    handler.emit(record("something else"))
    lines = stream.getvalue().splitlines()
    assert sum("refused" in line for line in lines) == REPEATS_MAX
    assert sum("each one" in line for line in lines) == REPEATS_MAX + 100
    handler.emit(record("something else", at_s=WINDOW_S))
    told = stream.getvalue().splitlines()[len(lines) :]
    assert told[0].endswith(f"refused {REPEATS_MAX + 99} (99 more like this left out)")
    assert "something else" in told[1]
    handler.emit(record("refused %d", 1, at_s=WINDOW_S + 1))
    assert "refused 1" in stream.getvalue().splitlines()[-1]


def test_what_was_left_out_is_told_at_the_end():
    stream = io.StringIO()
    handler = LineHandler(stream)
    handler.setFormatter(JsonLines(1))
    for _ in range(REPEATS_MAX + 3):
        handler.emit(record("again"))
    handler.close()
    assert json.loads(stream.getvalue().splitlines()[-1])["left_out"] == 2


def test_the_kinds_that_are_counted_are_bounded():
    limit = RepeatLimit()
    for number in range(2 * KINDS_MAX):
        assert limit.passes(record(f"kind {number}"))
    assert len(limit._kinds) == KINDS_MAX


def test_a_clock_that_is_set_back_does_not_silence_anything():
    limit = RepeatLimit()
    for _ in range(REPEATS_MAX + 1):
        limit.passes(record("again", at_s=1000.0))
    assert len(list(limit.due(10.0))) == 1
    assert limit.passes(record("again", at_s=10.0))


def test_level_and_format_are_configured(root: logging.Logger):
    stream = io.StringIO()
    set_up(NodeConfig({"log.format": "json", "log.level": "warning"}), stream)
    logging.getLogger("tidelog.test").info("not told")
    logging.getLogger("tidelog.test").warning("told")
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["message"] == "told"


def test_a_lone_node_is_quiet_about_its_elections_unless_asked(root: logging.Logger):
    stream = io.StringIO()
    set_up(NodeConfig(), stream)
    logging.getLogger("tidelog.quorum").info("elected")
    assert stream.getvalue() == ""
    logging.getLogger("tidelog.quorum").setLevel(logging.NOTSET)
    set_up(NodeConfig({"log.level": "INFO"}), stream)
    logging.getLogger("tidelog.quorum").info("elected")
    assert "elected" in stream.getvalue()


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_nobody_reading_the_log_is_no_trouble(capsys: pytest.CaptureFixture[str]):
    handler = LineHandler(Closed())
    handler.emit(record("said to nobody"))
    assert capsys.readouterr().err == ""


async def test_requests_leave_no_lines(running: RunningNode, caplog: pytest.LogCaptureFixture):
    wire = await running.connect()
    await wire.create_topic("t")
    caplog.clear()
    caplog.set_level(logging.INFO)
    for _ in range(20):
        await wire.call(produce("t", batch(b"value")), 9, ProduceResponse)
        await wire.call(produce("missing", batch(b"value")), 9, ProduceResponse)
        await wire.call(fetch("t"), 11, FetchResponse)
        await wire.call(MetadataRequest(), 9, MetadataResponse)
    assert [made.getMessage() for made in caplog.records] == []
