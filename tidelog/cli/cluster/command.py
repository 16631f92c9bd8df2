"""The commands of `tidelog cluster`: start, show, kill, pause, restart and stop nodes on this machine.

`nodes.py` manages the processes, `state.py` the shared file, `view.py` the tables.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from tidelog.cli.cluster.state import (
    KILLED,
    PAUSED,
    RUNNING,
    STOPPED,
    ClusterFile,
    ClusterState,
    NoCluster,
    Node,
)
from tidelog.cli.common import (
    HELP,
    CommandGroup,
    IntegerRange,
    NumberRange,
    announce,
    as_json,
    echo,
    end_signals,
    key_values,
    overriding,
    print_json,
    print_table,
    reason,
)
from tidelog.protocol.errors import counted

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_DATA = click.option(
    "--data",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    default="tidelog-cluster",
    show_default=True,
    metavar="DIR",
    help="Where the cluster keeps its data and its cluster.json.",
)
_SOME = click.argument("ids", metavar="NODE...", nargs=-1, type=int, required=True)
_ANY = click.argument("ids", metavar="[NODE]...", nargs=-1, type=int)


@click.group("cluster", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """Run a cluster of several nodes on this machine.

    \b
    Example, in two terminals:
      tidelog cluster start --brokers 3 --data demo
      tidelog cluster kill --data demo 2
    """


@command.command("start")
@click.option("--brokers", type=IntegerRange(1, 100), help="How many; 3 for a new cluster.")
@click.option(
    "--controllers", type=IntegerRange(0, 9), help="How many on their own; without, the first brokers are both."
)
@click.option("--port", type=IntegerRange(1, 65535), help="Of the first broker, 9092; the others follow.")
@_DATA
@click.option("--detach", is_flag=True, help="Return when the cluster is ready, and let it run.")
@click.option("--json", "json_wanted", is_flag=True, help="Say in JSON where it is, once it is ready.")
@overriding("A configuration value for every node, by Kafka's name.")
def start(
    brokers: int | None,
    controllers: int | None,
    port: int | None,
    directory: Path,
    detach: bool,
    json_wanted: bool,
    overrides: dict[str, str],
) -> int:
    """Start a cluster, the one that DIR holds or a new one, and show it until Ctrl-C ends it.

    Brokers listen on --port and the ports after it, controllers 100 above. The first line of output has the addresses.

    \b
    Examples:
      tidelog cluster start --brokers 3
      tidelog cluster start --brokers 4 --controllers 3 --port 19092 --data demo --detach
    """
    from tidelog.cli.cluster import nodes as cluster_nodes
    from tidelog.protocol.errors import ConfigError

    file = ClusterFile(directory)
    try:
        cluster_nodes.check_options(overrides)
        state = _existing(file, brokers, controllers, port) if file.exists() else None
        is_new = state is None
        if state is None:
            state = cluster_nodes.plan(file.directory, brokers or 3, controllers or 0, port or 9092, overrides)
        for node in state.nodes:
            node.config |= overrides
        cluster_nodes.check_configuration(state.nodes)
        cluster_nodes.check_ports(state.nodes)
    except (NoCluster, cluster_nodes.ClusterFailed, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    if is_new:
        file.create(state)
    _launch_all(file, state, detach, json_wanted)
    return 0


def _existing(file: ClusterFile, brokers: int | None, controllers: int | None, port: int | None) -> ClusterState:
    """The existing cluster. Refuses a running one, and one that differs from the options."""
    from tidelog.cli.cluster.nodes import ClusterFailed

    state = file.read()
    running = [str(node.id) for node in state.nodes if node.is_there]
    if running:
        raise ClusterFailed(f"the cluster in {file.directory} is running already: node {', '.join(running)}")
    there = {
        "--brokers": sum(node.is_broker for node in state.nodes),
        "--controllers": sum(not node.is_broker for node in state.nodes),
        "--port": int(state.nodes[0].addresses["PLAINTEXT"].rpartition(":")[2]),
    }
    options = {"--brokers": brokers, "--controllers": controllers, "--port": port}
    for name, value in options.items():
        if value is not None and value != there[name]:
            raise ClusterFailed(f"the cluster in {file.directory} was made with {name} {there[name]}, not {value}")
    return state


def _launch_all(file: ClusterFile, state: ClusterState, detach: bool, json_wanted: bool) -> None:
    began = time.monotonic()
    end_signals = _EndSignals()
    try:
        _bring_up(file, state)
        seconds = time.monotonic() - began
        if json_wanted:
            print_json(
                {
                    "bootstrap_servers": state.bootstrap,
                    "cluster_id": state.cluster_id,
                    "data": str(file.directory),
                    "seconds": round(seconds, 3),
                    "nodes": [{"id": one.id, "role": one.role, "pid": one.pid} for one in state.nodes],
                }
            )
        else:
            announce(
                f"tidelog cluster ready in {seconds:.2f} s: {state.bootstrap} "
                f"(cluster {state.cluster_id}, {counted(len(state.nodes), 'node')}, data {file.directory})"
            )
        if not detach:
            asyncio.run(_show(file, end_signals))
    except KeyboardInterrupt:
        if detach:  # the caller counts on a cluster that runs
            detach = False
            raise
    finally:
        if not detach:
            end_signals.ignore()
            _end_all(file)


def _bring_up(file: ClusterFile, state: ClusterState) -> None:
    """Start all nodes, or none: where one cannot start, for instance because the disk is full, the others end."""
    from tidelog.cli.cluster import nodes as cluster_nodes

    try:
        cluster_nodes.launch_all(file, state.nodes, state.cluster_id)
        cluster_nodes.await_ready(state.nodes)
    except (cluster_nodes.ClusterFailed, OSError) as error:
        cluster_nodes.kill(state.nodes)
        cluster_nodes.set_requested(file, state.nodes, STOPPED)
        raise click.ClickException(reason(error) if isinstance(error, OSError) else str(error)) from None


class _EndSignals:
    """Signal handlers: SIGTERM and SIGHUP end the cluster as Ctrl-C does."""

    def __init__(self) -> None:
        for number in end_signals():
            if number != signal.SIGINT:
                signal.signal(number, self._interrupt)

    @staticmethod
    def _interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    @staticmethod
    def ignore() -> None:
        """Ignore further signals, because they must not interrupt the end of the cluster."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _end_all(file: ClusterFile) -> None:
    """End all nodes of the file, including those that another terminal has started since."""
    from tidelog.cli.cluster import nodes as cluster_nodes

    try:
        nodes = file.read().nodes
    except NoCluster:
        return
    running = [node for node in nodes if node.is_there]
    cluster_nodes.set_requested(file, running, STOPPED)
    cluster_nodes.end(running)
    cluster_nodes.set_requested(file, running, STOPPED)


async def _show(file: ClusterFile, end_signals: _EndSignals, every_s: float = 1.0) -> None:
    """Show a live table, or where no terminal can draw one a line for each change, until the cluster is stopped."""
    from rich.console import Console
    from rich.live import Live

    from tidelog.cli.cluster import nodes as cluster_nodes
    from tidelog.cli.cluster.view import live_table, look

    console = Console()
    seen = {node.id: RUNNING for node in file.read().nodes}
    is_drawn = console.is_terminal and not console.is_dumb_terminal
    live = Live(console=console, auto_refresh=False) if is_drawn else None
    if live is not None:
        live.start()
    try:
        while True:
            cluster_nodes.bury()
            state = file.read()
            now = {node.id: node.now for node in state.nodes}
            if all(each == STOPPED for each in now.values()):
                return
            if live is not None:
                live.update(live_table(await look(state)), refresh=True)
            else:
                for node, each in now.items():
                    if seen.get(node) != each:
                        echo(f"node {node}: {each}")
            if now != seen:
                with file.changing():
                    pass  # saves the nodes that have died
            seen = now
            await asyncio.sleep(every_s)
    finally:
        if live is not None:
            live.stop()


@command.command("status")
@_ANY
@_DATA
@as_json
def status(ids: tuple[int, ...], directory: Path, json_wanted: bool) -> None:
    """Print each node's process and address, and what it leads.

    \b
    Example:
      tidelog cluster status --data demo
    """
    from tidelog.cli.cluster.view import HEADER, cells, look, summary
    from tidelog.cli.cluster.view import as_json as view_as_json

    state = _state(directory)
    chosen = {node.id for node in _chosen(state, ids)}
    view = asyncio.run(look(state))
    if json_wanted:
        content = view_as_json(view)
        content["nodes"] = [each for each in content["nodes"] if each["id"] in chosen]
        print_json(content)
        return
    print_table(HEADER, [cells(view, node) for node in state.nodes if node.id in chosen])
    echo(f"\n{summary(view)}")


@command.command("kill")
@_SOME
@_DATA
@as_json
def kill(ids: tuple[int, ...], directory: Path, json_wanted: bool) -> None:
    """Kill nodes (SIGKILL), as a crash would.

    \b
    Example:
      tidelog cluster kill --data demo 2
    """
    from tidelog.cli.cluster import nodes as cluster_nodes

    nodes = _running(directory, ids)
    cluster_nodes.set_requested(ClusterFile(directory), nodes, KILLED)
    killed = cluster_nodes.kill(nodes)
    cluster_nodes.set_requested(ClusterFile(directory), nodes, KILLED)
    _say("killed", killed, json_wanted)


@command.command("pause")
@_SOME
@_DATA
@as_json
def pause(ids: tuple[int, ...], directory: Path, json_wanted: bool) -> None:
    """Freeze nodes (SIGSTOP), as a machine that hangs; `resume` wakes them.

    \b
    Example:
      tidelog cluster pause --data demo 2
    """
    from tidelog.cli.cluster import nodes as cluster_nodes

    paused = [node for node in _running(directory, ids) if node.signal(signal.SIGSTOP)]
    cluster_nodes.set_requested(ClusterFile(directory), paused, PAUSED)
    _say("paused", paused, json_wanted)


@command.command("resume")
@_ANY
@_DATA
@as_json
def resume(ids: tuple[int, ...], directory: Path, json_wanted: bool) -> None:
    """Wake nodes that were paused, all of them without NODE.

    \b
    Example:
      tidelog cluster resume --data demo
    """
    from tidelog.cli.cluster import nodes as cluster_nodes

    state = _state(directory)
    nodes = _running(directory, ids) if ids else [node for node in state.nodes if node.now == PAUSED]
    woken = [node for node in nodes if node.signal(signal.SIGCONT)]
    cluster_nodes.set_requested(ClusterFile(directory), woken, RUNNING)
    _say("resumed", woken, json_wanted)


@command.command("restart")
@_ANY
@_DATA
@as_json
def restart(ids: tuple[int, ...], directory: Path, json_wanted: bool) -> None:
    """Start nodes again; those that run are stopped first. Without NODE all that do not run.

    \b
    Example:
      tidelog cluster restart --data demo 2
    """
    from tidelog.cli.cluster import nodes as cluster_nodes

    file = ClusterFile(directory)
    state = _state(directory)
    nodes = _chosen(state, ids) if ids else [node for node in state.nodes if not node.is_there]
    cluster_nodes.end(nodes)
    began = time.monotonic()
    try:
        cluster_nodes.check_ports(nodes)
        cluster_nodes.launch_all(file, nodes, state.cluster_id)
        cluster_nodes.await_ready(nodes)
    except cluster_nodes.ClusterFailed as error:
        raise click.ClickException(str(error)) from None
    if nodes or json_wanted:
        _say("restarted", nodes, json_wanted, f" in {time.monotonic() - began:.2f} s")


@command.command("stop")
@_ANY
@_DATA
@as_json
def stop(ids: tuple[int, ...], directory: Path, json_wanted: bool) -> None:
    """Stop nodes in good order (SIGTERM), all of them without NODE.

    \b
    Example:
      tidelog cluster stop --data demo
    """
    from tidelog.cli.cluster import nodes as cluster_nodes

    nodes = [node for node in _chosen(_state(directory), ids) if node.is_there]
    cluster_nodes.set_requested(ClusterFile(directory), nodes, STOPPED)
    cluster_nodes.end(nodes)
    cluster_nodes.set_requested(ClusterFile(directory), nodes, STOPPED)
    _say("stopped", nodes, json_wanted)


@command.command("balance")
@_DATA
@click.option("--seconds", type=NumberRange(0.1), default=3.0, show_default=True, help="How long to measure.")
@click.option("--measure", "names", multiple=True, help="Count only this one; may be given many times.")
@click.option(
    "--weight",
    "weights",
    multiple=True,
    metavar="MEASURE=NUMBER",
    callback=lambda context, parameter, values: _weights(values),
    help="How much one counts; 1 without.",
)
@as_json
def balance(
    directory: Path, seconds: float, names: tuple[str, ...], weights: dict[str, float], json_wanted: bool
) -> int:
    """Print how evenly the load lies on the brokers: shares, deviation rates (alarm above 10 %), spread.

    \b
    Example:
      tidelog cluster balance --data demo --weight leaders=2 --seconds 10
    """
    from tidelog.cli.cluster.balance import MEASURES, show

    for option, given in (("--measure", names), ("--weight", weights)):
        if unknown := [name for name in given if name not in MEASURES]:
            text = f"{unknown[0]!r} is none; the measures are {', '.join(MEASURES)}"
            raise click.BadParameter(text, param_hint=option)
    return show(_state(directory), names, weights, seconds, json_wanted)


def _weights(values: Sequence[str]) -> dict[str, float]:
    weights = {}
    for name, text in key_values(values).items():
        try:
            weights[name] = float(text)
        except ValueError:
            weights[name] = math.nan
        if not 0 <= weights[name] < math.inf:
            raise click.BadParameter(f"{text!r} of {name!r} is not a number from 0 on")
    return weights


def _state(directory: Path) -> ClusterState:
    try:
        return ClusterFile(directory).read()
    except NoCluster as error:
        raise click.ClickException(str(error)) from None


def _chosen(state: ClusterState, ids: tuple[int, ...]) -> list[Node]:
    try:
        return state.chosen(ids)
    except NoCluster as error:
        raise click.ClickException(str(error)) from None


def _running(directory: Path, ids: tuple[int, ...]) -> list[Node]:
    """These nodes. Raises a ClickException if one does not run."""
    nodes = _chosen(_state(directory), ids)
    gone = [f"node {node.id} is not running ({node.now})" for node in nodes if not node.is_there]
    if gone:
        raise click.ClickException("; ".join(gone))
    return nodes


def _say(what: str, nodes: list[Node], json_wanted: bool, more: str = "") -> None:
    if json_wanted:
        print_json([{"id": node.id, "outcome": what, "pid": node.pid if node.is_there else None} for node in nodes])
        return
    for node in nodes:
        echo(f"{what} node {node.id}{more}")
    if not nodes:
        echo(f"no node was {what}")
