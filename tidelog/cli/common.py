"""The common part of the client commands: the bootstrap option, client options by `-X`, coroutines, printing.

Tables are plain aligned text without wrapping or colours, so that `cut` and `grep` can process them. Every command that
prints a table also has `--json`, which prints one JSON value.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence, Sized
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tidelog.client.model import Node
    from tidelog.protocol.errors import KafkaError

Result = TypeVar("Result")
Thing = TypeVar("Thing")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

# A user waits at the terminal, so a command gives up sooner than a service would.
PATIENCE_MS = 5_000
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_SUMMARY_CHARS_MAX = 200
_DEFAULT_PORT = 9092
_REPEATED_SIGNAL_S = 1.0
_PATTERN_CHARACTERS = frozenset("*+?[](){}|^$\\")


class CommandGroup(click.Group):
    """A group whose help has the whole summary of each command. click cuts it at the end of the line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = sorted(self.commands.items())
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(_SUMMARY_CHARS_MAX)) for name, each in commands])


class WrongValue(click.ClickException):
    """Wrong usage by the value of an option, which is one line: the options of the command do not explain it."""

    exit_code = 2


class _Warnings(logging.Handler):
    """Prints what is logged, as lines on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            click.echo(f"tidelog: {record.levelname.lower()}: {self.format(record)}", err=True)
        except Exception:  # as of a closed pipe; what logs it is not at fault
            self.handleError(record)


_WARNINGS = _Warnings(logging.WARNING)
# Most commands end with the reason within seconds, and a warning before it would say the same.
_CONNECTIONS = logging.getLogger("tidelog.client.network.cluster")
_CONNECTIONS.addHandler(logging.NullHandler())


def with_ports(text: str) -> str:
    """Bootstrap servers as host:port, with Kafka's port by default."""
    return ",".join(map(_with_port, text.split(",")))


def _with_port(server: str) -> str:
    host = server.strip()
    has_port = not host or (host.rpartition("]")[2] if host.startswith("[") else host).count(":")
    return host if has_port else f"{host}:{_DEFAULT_PORT}"


_BOOTSTRAP = click.option(
    "-b",
    "--bootstrap-server",
    "bootstrap",
    default="127.0.0.1:9092",
    envvar="TIDELOG_BOOTSTRAP_SERVER",
    show_default=True,
    show_envvar=True,
    metavar="HOST[:PORT]",
    callback=lambda context, parameter, value: with_ports(value),
    help="A broker of the cluster; several with commas. Without PORT it is 9092.",
)
as_json = click.option("--json", "json_wanted", is_flag=True, help="Print JSON.")


def alternative(flag: str, name: str, value: object, about: str) -> Callable[[Decorated], Decorated]:
    """Add a flag that gives the parameter `name` this value. Another flag of the same parameter excludes it; without
    any of them the parameter is None.
    """

    def choose(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
        other = context.meta.get(f"{__name__}.{name}")
        context.params.setdefault(name, None)
        if not is_given:
            return
        if other is not None:
            raise click.UsageError(f"give {other} or {flag}, not both")
        context.meta[f"{__name__}.{name}"] = flag
        context.params[name] = value

    return click.option(flag, is_flag=True, expose_value=False, callback=choose, help=about)


def key_value_option(*names: str, about: str) -> Callable[[Decorated], Decorated]:
    """Add an option that may be given many times; the parameter is a mapping."""
    return click.option(
        *names,
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda context, parameter, values: key_values(values),
        help=about,
    )


_PROPERTIES = key_value_option(
    "-X",
    "--property",
    "properties",
    about="A client option by Kafka's name, such as request.timeout.ms=5000. May be given many times.",
)


def overriding(what: str) -> Callable[[Decorated], Decorated]:
    """Add the option `-o key=value` to a command: configuration by Kafka's names, as the parameter `overrides`."""
    return key_value_option("-o", "--override", "overrides", about=f"{what} May be given many times.")


def key_values(values: Sequence[str]) -> dict[str, str]:
    """`["a=1", "b=2"]` as a mapping. Raises a usage error, which names the option in a callback of it only."""
    pairs = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key.strip():
            raise click.BadParameter(f"{value!r} is not key=value")
        pairs[key.strip()] = text.strip()
    return pairs


def connecting(function: Decorated) -> Decorated:
    """Add the options that a connection to a cluster needs: `bootstrap` and `properties`."""
    return _BOOTSTRAP(_PROPERTIES(function))


def client_options(bootstrap: str, properties: dict[str, str], **own: Any) -> dict[str, Any]:
    """The keyword arguments of a client; the user's `-X` options take precedence over the command's."""
    given = {key.replace(".", "_"): value for key, value in properties.items()}
    patience = {"default_api_timeout_ms": PATIENCE_MS, "socket_connection_setup_timeout_ms": PATIENCE_MS}
    return {"bootstrap_servers": bootstrap, "client_id": "tidelog-cli", **patience, **own, **given}


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a command's coroutine. What a client cannot take is wrong usage, an unhandled Ctrl-C a failure."""
    from tidelog.client.arguments import WrongArgument
    from tidelog.protocol.errors import ConfigError

    try:
        return asyncio.run(main)
    except (ConfigError, WrongArgument) as error:
        raise WrongValue(str(error)) from None
    except KeyboardInterrupt:
        raise click.ClickException("interrupted") from None


def require_running(nodes: Iterable[Node], broker_ids: Iterable[int]) -> None:
    """Raise BROKER_NOT_AVAILABLE for a broker that is not among these nodes, or is fenced: only itself could answer."""
    from tidelog.protocol.errors import ErrorCode, KafkaError

    fenced = {node.node_id: node.fenced for node in nodes}
    for broker_id in sorted(broker_ids):
        if fenced.get(broker_id, True):
            problem = f"broker {broker_id} is not running" if broker_id in fenced else f"there is no broker {broker_id}"
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, problem)


def print_warnings() -> None:
    """Print warnings for which there is no handler as a command's other messages, and not as bare lines."""
    logging.lastResort = _WARNINGS


def warn_of_unreachable_brokers() -> None:
    """Print what the client logs of brokers that it cannot reach, for a command that waits for them."""
    _CONNECTIONS.addHandler(_WARNINGS)


def text_in(file: Path) -> str:
    """The text of a file that the user has named, without a byte order mark. Raises ClickException for other bytes."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise click.ClickException(f"cannot read {file}: it is not UTF-8 text") from None


class IntegerRange(click.IntRange):
    """A range of whole numbers. click calls a word that is none "not a valid integer range"."""

    name = "integer"


class NumberRange(click.FloatRange):
    """A range of numbers, without `nan`, which is within none."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def end_signals() -> list[signal.Signals]:
    """The signals that end a command in good order. Those of a terminal, SIGINT of Ctrl-C and SIGHUP when it closes,
    are not among them where the caller ignores them: nohup ignores SIGHUP, and the shell of a script ignores SIGINT
    for each command with `&`.
    """
    of_terminals = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    return [signal.SIGTERM, *of_terminals]


def call_at_end_signals(stop: Callable[[], object]) -> None:
    """Call `stop` at the first of `end_signals`. One that comes a second later or more ends the process: a broker may
    never answer what the command still waits for. What comes sooner means the same again: timeout(1) sends each twice.
    """
    loop, signals = asyncio.get_running_loop(), end_signals()

    def stop_once() -> None:
        stop()
        loop.call_later(_REPEATED_SIGNAL_S, let_them_end_it)

    def let_them_end_it() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)  # Python's own for SIGINT would wait for the same answer

    for number in signals:
        loop.add_signal_handler(number, stop_once)


def fail(message: str) -> int:
    """Print one line on standard error; returns the exit code of a failure."""
    click.echo(f"tidelog: {' '.join(message.split())}", err=True)
    return 1


def with_advice(error: KafkaError) -> str:
    """The error, with advice for the user if no broker answered, or not in time, or if a name is a pattern."""
    from tidelog.protocol.errors import ErrorCode

    message = error.message or ""
    if error.code == ErrorCode.INVALID_TOPIC_EXCEPTION and _PATTERN_CHARACTERS & set(message):
        return f"{error} (a name is wanted here, no pattern)"
    if message.startswith("no answer within default_api_timeout_ms"):
        return f"{error} (-X default.api.timeout.ms=60000 waits longer)"
    if not message.startswith("no broker reached"):
        return str(error)
    return f"{error} (-b HOST:PORT or TIDELOG_BOOTSTRAP_SERVER say where the cluster is, `tidelog start` runs a node)"


async def change_each(
    things: Iterable[Thing], change: Callable[[Thing], Awaitable[str]]
) -> tuple[dict[Thing, str], int]:
    """Change these things one after the other: the outcome of each, and the exit code. One that is refused has
    `failed`, with a line. One without an answer has `no answer`, with a line: it may be carried out yet. Those that
    follow would wait as long: they are `not tried`.
    """
    from tidelog.client.admin.base import is_final, is_unanswered
    from tidelog.protocol.errors import KafkaError

    outcomes: dict[Thing, str] = {}
    status, is_answered = 0, True
    for thing in things:
        outcomes[thing] = "not tried"
        if not is_answered:
            continue
        try:
            outcomes[thing] = await change(thing)
        except KafkaError as error:
            is_answered = is_final(error)
            outcomes[thing], line = "failed", with_advice(error)
            if is_unanswered(error):
                outcomes[thing], line = "no answer", f"{thing}: it may be carried out yet: {line}"
            status = fail(line)
    untried = [str(thing) for thing, outcome in outcomes.items() if outcome == "not tried"]
    if untried:
        fail(f"not tried: {', '.join(untried)}")
    return outcomes, status


async def answered_by_brokers(asking: Awaitable[Result]) -> tuple[Result, int]:
    """The result for the brokers that answer, and the exit code. Prints a line for each other broker.

    Raises KafkaError if none answers.
    """
    from tidelog.client import BrokerErrors

    try:
        return await asking, 0
    except BrokerErrors as error:
        for broker_id, problem in sorted(error.errors.items()):
            fail(f"without broker {broker_id}: {problem}")
        return error.answers, 1


def reason(error: OSError) -> str:
    """The error with its file. One without a name is that of the working directory, where a path is relative to it."""
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return f"the working directory: {error.strerror}"
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


def echo(text: str = "", newline: bool = True) -> None:
    """Print on standard output. When its reader has closed it, as `head` does, the command goes on without it: its work
    and its exit code are the same.
    """
    try:
        emit(text, newline)
    except BrokenPipeError:
        swallow_output()


def emit(text: str, newline: bool = True) -> None:
    """Print on standard output, for a command that only prints, and that a reader ends with a BrokenPipeError."""
    try:
        click.echo(text, nl=newline)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise cannot_write(error) from None


def cannot_write(error: OSError) -> click.ClickException:
    """The failure of a command whose output cannot be written. It writes nothing more."""
    swallow_output()
    return click.ClickException(f"cannot write standard output: {reason(error)}")


def announce(line: str) -> None:
    """Print the first line of what runs on: it is ready, with its address. It does so without a reader, too."""
    try:
        click.echo(line)
    except OSError:
        swallow_output()


def swallow_output() -> None:
    """Discard standard output from now on, with its buffer, because it cannot be written any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def as_count(things: Sized, noun: str) -> str:
    """`3 topics`, `1 topic`."""
    return f"{len(things):,} {noun}{'' if len(things) == 1 else 's'}"


def as_bytes(size: int) -> str:
    """`1.4 MiB`; a dash for an unknown size."""
    if size < 0:
        return "-"
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


def as_time(timestamp_ms: int) -> str:
    """`2026-03-01T12:00:00.000Z`; a dash for a negative timestamp, the number for one outside the calendar."""
    try:
        moment = datetime.fromtimestamp(timestamp_ms // 1000, UTC) if timestamp_ms >= 0 else None
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return "-" if moment is None else f"{moment:%Y-%m-%dT%H:%M:%S}.{timestamp_ms % 1000:03d}Z"


def time_in(text: str) -> int:
    """Milliseconds since 1970, from a number or a date and time (UTC by default). Raises a usage error."""
    if text.isdecimal() and len(text) < 18:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time: expected ms since 1970, or YYYY-MM-DDTHH:MM:SS") from None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def say_count(count: int) -> None:
    """Print the count on standard error, apart from the data."""
    click.echo(f"{count:,} record{'' if count == 1 else 's'}", err=True)


def print_json(value: Any) -> None:
    echo(json.dumps(value, indent=2, sort_keys=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print columns as wide as their widest cell, with numbers right-aligned."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *texts]) for column in range(len(header))]
    right = [bool(rows) and all(isinstance(row[column], int) for row in rows) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in zip(cells, widths, right)
        )
        return "  ".join(padded).rstrip()

    echo(line(header))
    for row in texts:
        echo(line(row))
