"""`tidelog top`: a live view of topics, groups and brokers; with `--once` one view for scripts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidelog.cli.common import (
    HELP,
    NumberRange,
    as_bytes,
    client_options,
    connecting,
    echo,
    end_signals,
    print_json,
    print_table,
    run,
)
from tidelog.cli.top.rates import SORTS, View, view
from tidelog.cli.top.snapshot import Snapshot, take
from tidelog.client import Admin
from tidelog.protocol.errors import KafkaError

_BROKERS = ("BROKER", "ADDRESS", "STATE", "LEADERS", "REPLICAS", "LOGS", "RECORDS/S", "BYTES/S")
_TOPICS = ("TOPIC", "PARTITIONS", "UNDER-REPLICATED", "NO LEADER", "SIZE", "RECORDS/S", "BYTES/S")
_GROUPS = ("GROUP", "STATE", "MEMBERS", "TOPICS", "LAG", "READ/S")
# The lines of a terminal for titles, headers and frames.
_LINES_AROUND = 15
_ROWS_MIN = 3


def _pattern(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        re.compile(value or "")
    except re.error as error:
        raise click.BadParameter(f"{value!r} is not a regular expression: {error}") from None
    return value


@click.command("top", context_settings=HELP)
@click.option("-d", "--delay", type=NumberRange(0.1, 3600), default=2.0, show_default=True, help="Seconds between.")
@click.option("--once", is_flag=True, help="Print one view, of that many seconds, and end.")
@click.option("--sort", type=click.Choice(SORTS), default="rate", show_default=True, help="Topics and groups by this.")
@click.option(
    "--include", "pattern", callback=_pattern, metavar="PATTERN", help="Only topics and groups that match it."
)
@click.option("--internal", is_flag=True, help="Also topics that Kafka keeps for itself.")
@click.option("--json", "json_wanted", is_flag=True, help="Print JSON, with --once.")
@connecting
def command(
    delay: float, once: bool, json_wanted: bool, bootstrap: str, properties: dict[str, str], **shown: Any
) -> None:
    """Show what flows through the cluster: brokers, topics, groups with their lag, until Ctrl-C.

    Rates are those since the view before. BYTES/S is what logs have grown by, as it lies on disk: of a topic at its
    leaders, of a broker with all its replicas. Where the output is not a terminal, or TERM is dumb, it ends after one
    view.

    \b
    Examples:
      tidelog top
      tidelog top --once --json --sort lag
    """
    if json_wanted and not once:
        raise click.UsageError("--json requires --once")
    options = client_options(bootstrap, properties)
    if not once and sys.stdout.isatty() and not Console().is_dumb_terminal:
        run(_live(options, delay, shown))
        return
    seen = run(_once(options, delay, shown))
    if json_wanted:
        print_json(seen.as_dict())
        return
    for number, (header, rows) in enumerate(_tables(seen)):
        if number:
            echo()
        print_table(header, rows)


async def _once(options: dict[str, Any], delay: float, shown: dict[str, Any]) -> View:
    async with Admin(**options) as admin, Admin(**options) as quorum:
        before = await take(admin, quorum)
        await asyncio.sleep(delay)
        return view(before, await take(admin, quorum), **shown)


async def _live(options: dict[str, Any], delay: float, shown: dict[str, Any]) -> None:
    """Show views until Ctrl-C, which waits for no answer. If the cluster does not answer, the last view stays, with a
    message.
    """
    views = asyncio.ensure_future(_show_views(options, delay, shown))
    for number in end_signals():
        asyncio.get_running_loop().add_signal_handler(number, views.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await views


async def _show_views(options: dict[str, Any], delay: float, shown: dict[str, Any]) -> None:
    console = Console()
    before: Snapshot | None = None
    last: View | None = None
    async with Admin(**options) as admin, Admin(**options) as quorum:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                problem = ""
                try:
                    now = await take(admin, quorum)
                    last, before = view(before, now, **shown), now
                except KafkaError as error:
                    problem = str(error)
                live.update(_screen(last, problem, console.height), refresh=True)
                await asyncio.sleep(delay)


def _screen(seen: View | None, problem: str, height: int) -> Group:
    head = Text(f"tidelog top  {time.strftime('%H:%M:%S')}", style="bold")
    if problem:
        head.append(f"  {problem}", style="red")
    if seen is None:
        return Group(head)
    head.append(f"  cluster {seen.cluster_id}, controller {seen.leader_id}", style="dim")
    tables = _tables(seen)
    room = max(_ROWS_MIN, height - _LINES_AROUND - min(len(seen.brokers), _ROWS_MIN))
    shares = (room // 3, room // 3, room - 2 * (room // 3))
    return Group(head, *(_table(header, rows, max(_ROWS_MIN, share)) for (header, rows), share in zip(tables, shares)))


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], most: int) -> Table:
    table = Table(expand=True, caption_justify="left", box=None, padding=(0, 1, 0, 0))  # headers fit in 80 columns
    for name in header:
        is_text = name in ("BROKER", "ADDRESS", "STATE", "TOPIC", "GROUP")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows[:most]:
        table.add_row(*(Text(str(cell), style=_style(name, cell)) for name, cell in zip(header, row)))
    if len(rows) > most:
        table.caption = f"and {len(rows) - most:,} more"
    return table


def _style(name: str, cell: object) -> str:
    is_bad = (name in ("UNDER-REPLICATED", "NO LEADER") and cell != 0) or cell in ("fenced", "unreachable", "Dead")
    return "red" if is_bad else ""


def _tables(seen: View) -> list[tuple[Sequence[str], list[tuple[object, ...]]]]:
    brokers: list[tuple[object, ...]] = [
        (
            f"{row.broker}{'*' if row.broker == seen.leader_id else ''}",
            row.address,
            row.state,
            row.leaders,
            row.replicas,
        )
        + (
            "-" if row.size_bytes is None else as_bytes(row.size_bytes),
            _rate(row.records_per_s),
            _bytes(row.bytes_per_s),
        )
        for row in seen.brokers
    ]
    topics: list[tuple[object, ...]] = [
        (row.topic, row.partitions, row.under_replicated, row.without_leader, as_bytes(row.size_bytes))
        + (_rate(row.records_per_s), _bytes(row.bytes_per_s))
        for row in seen.topics
    ]
    groups: list[tuple[object, ...]] = [
        (row.group, row.state, row.members, row.topics, row.lag, _rate(row.records_per_s)) for row in seen.groups
    ]
    return [(_BROKERS, brokers), (_TOPICS, topics), (_GROUPS, groups)]


def _rate(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.1f}" if amount < 100 else f"{amount:,.0f}"


def _bytes(amount: float | None) -> str:
    return "-" if amount is None else as_bytes(round(amount))
