"""`tidelog reassign`: moves partitions between brokers, by the plans of Kafka's kafka-reassign-partitions.

`partition_lists.py` reads plans; this module carries them out and reports their progress.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import click

from tidelog.cli.common import (
    HELP,
    IntegerRange,
    alternative,
    as_count,
    client_options,
    connecting,
    echo,
    print_json,
    print_table,
    run,
    text_in,
)
from tidelog.cli.reassign import directories as reassign_directories
from tidelog.cli.reassign import partition_lists, proposals
from tidelog.cli.reassign.partition_lists import COMPLETE, ELSEWHERE, MOVING, UNANSWERED, Directories, Plan, Throttles
from tidelog.client import Admin, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError

T = TypeVar("T")

_HEARSAY_S = 0.3
_NO_THROTTLED_REPLICAS: dict[str, str | None] = {
    partition_lists.LEADER_THROTTLE: None,
    partition_lists.FOLLOWER_THROTTLE: None,
}
_NO_RATE: dict[str, str | None] = {partition_lists.LEADER_RATE: None, partition_lists.FOLLOWER_RATE: None}


@click.command("reassign", context_settings=HELP)
@click.option("--json", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The plan.")
@alternative("--execute", "action", "execute", "Start the moves of the plan.")
@alternative("--verify", "action", "verify", "Say how far they are; exit code 1 until all are done.")
@alternative("--cancel", "action", "cancel", "Stop them, and go back to where each began.")
@alternative("--list", "action", "list", "Say which partitions are being moved, of any plan.")
@alternative("--generate", "action", "generate", "Propose a plan for topics; nothing is moved.")
@click.option(
    "--topics-to-move-json",
    "topics_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='--generate: the topics, {"version":1,"topics":[{"topic":"flights"}]}.',
)
@click.option("--broker-list", metavar="IDS", help="--generate: the brokers they shall lie on, 1,2,3.")
@click.option("--disable-rack-aware", is_flag=True, help="--generate: leave racks out of account.")
@click.option("--throttle", type=IntegerRange(1), metavar="BYTES", help="--execute: at most so much a second.")
@click.option(
    "--replica-alter-log-dirs-throttle",
    "directory_throttle",
    type=IntegerRange(1),
    metavar="BYTES",
    help="--execute: the same between the directories of a broker.",
)
@click.option("--additional", is_flag=True, help="--execute: though others are being moved.")
@click.option("--preserve-throttles", is_flag=True, help="--verify, --cancel: leave the throttles when all is done.")
@click.option("--output-json", is_flag=True, help="--verify, --list: print JSON.")
@connecting
def command(
    bootstrap: str,
    properties: dict[str, str],
    file: Path | None,
    action: str | None,
    throttle: int | None,
    directory_throttle: int | None,
    additional: bool,
    preserve_throttles: bool,
    output_json: bool,
    topics_file: Path | None,
    broker_list: str | None,
    disable_rack_aware: bool,
) -> int:
    """Move partitions to other brokers, as a plan says.

    A plan is what Kafka's own tool reads:
    {"version":1,"partitions":[{"topic":"flights","partition":0,"replicas":[2,3,4]}]}.
    --execute first prints the plan for the way back. Run --verify until all is done: it takes the throttles away.

    \b
    Example:
      tidelog reassign --generate --topics-to-move-json topics.json --broker-list 2,3,4
      tidelog reassign --json plan.json --execute --throttle 50000000
      tidelog reassign --json plan.json --verify
    """
    if action is None:
        raise click.UsageError("give one of --generate, --execute, --verify, --cancel, --list")
    if (topics_file is None or broker_list is None) if action == "generate" else (topics_file or broker_list):
        raise click.UsageError(
            "--generate requires --topics-to-move-json and --broker-list; other actions do not accept them"
        )
    if (file is None) != (action in ("list", "generate")):
        raise click.UsageError(f"--{action} {'does not read a plan' if file else 'requires a plan: --json FILE'}")

    async def ask() -> int:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            if topics_file is not None and broker_list is not None:
                return await _generate(admin, topics_file, broker_list, not disable_rack_aware)
            if action == "list" or file is None:
                return await _list(admin, output_json)
            plan, paths = _read(file, partition_lists.plan_in), _read(file, partition_lists.directories_in)
            if action == "execute":
                return await _execute(admin, plan, paths, throttle, directory_throttle, additional)
            if action == "verify":
                return await _verify(admin, plan, paths, preserve_throttles, output_json)
            return await _cancel(admin, plan, paths, preserve_throttles)

    return run(ask())


def _read(path: Path, contents: Callable[[str], T]) -> T:
    try:
        return contents(text_in(path))
    except partition_lists.ListError as error:
        raise click.ClickException(f"{path}: {error}") from None


async def _present_replicas(admin: Admin, plan: Plan) -> dict[TopicPartition, tuple[int, ...]]:
    """The present replicas of all partitions of the plan's topics; unknown topics are omitted."""
    topics = {topic for topic, _ in plan}
    described = await admin.describe_topics()
    return partition_lists.current({name: topic for name, topic in described.items() if name in topics})


async def _generate(admin: Admin, topics_file: Path, broker_list: str, by_rack: bool) -> int:
    """Print a proposal, in the exact words of Kafka's tool, because scripts parse them."""
    names = _read(topics_file, proposals.topics_in)
    broker_ids = [_as_broker(text) for text in broker_list.split(",")]
    if len(set(broker_ids)) < len(broker_ids):
        raise click.ClickException(f"{broker_list} names a broker twice")
    described = await admin.describe_topics(names)
    assignment = partition_lists.current(described)
    nodes = {node.node_id: node for node in (await admin.describe_cluster()).nodes}
    _refuse_strangers(set(broker_ids) - nodes.keys())
    brokers = [nodes[broker_id] for broker_id in broker_ids]
    try:
        plan = proposals.proposal(assignment, brokers, random.Random(), by_rack=by_rack)
    except partition_lists.ListError as error:
        raise click.ClickException(str(error)) from None
    paths = await reassign_directories.present(admin, assignment)
    echo(f"Current partition replica assignment\n{partition_lists.as_plan(assignment, paths)}\n")
    echo(f"Proposed partition reassignment configuration\n{partition_lists.as_plan(plan)}")
    return 0


def _as_broker(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise click.ClickException(f"expected a broker's id, not {text!r}")
    return int(text)


def _refuse_strangers(strangers: Collection[int]) -> None:
    if strangers:
        raise click.ClickException(f"no such brokers: {', '.join(map(str, sorted(strangers)))}")


async def _execute(
    admin: Admin,
    plan: Plan,
    paths: Directories,
    throttle: int | None,
    directory_throttle: int | None,
    additional: bool,
) -> int:
    assignment, moving = await _present_replicas(admin, plan), await admin.list_partition_reassignments()
    missing = [str(partition) for partition in plan if partition not in assignment]
    if missing:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ", ".join(missing))
    nodes = (await admin.describe_cluster(include_fenced=True)).nodes
    wanted = {replica for replicas in plan.values() for replica in replicas}
    _refuse_strangers(wanted - {each.node_id for each in nodes})
    if moving and not additional:
        raise click.ClickException(f"already moving {as_count(moving, 'partition')}; --additional adds to them")
    before = {partition: assignment[partition] for partition in plan}
    echo(partition_lists.as_plan(before, await reassign_directories.present(admin, before)))
    if throttle is not None:
        running = {each.node_id for each in nodes if not each.fenced}
        await _throttle(admin, partition_lists.throttles(plan, assignment, moving), throttle, running)
    if directory_throttle is not None:
        await reassign_directories.hold(admin, paths, directory_throttle)
    outcomes = await admin.alter_partition_reassignments(plan)
    status = _report(outcomes, "started", "move")
    return status or await reassign_directories.start(admin, paths)


async def _throttle(admin: Admin, throttles: Throttles, bytes_per_s: int, running: Collection[int]) -> None:
    """Set the throttles before the moves start. A broker takes its own rate, so that one that is down has none."""
    if not throttles.topics:
        return
    rate: dict[str, str | None] = dict.fromkeys(_NO_RATE, str(bytes_per_s))
    held = [broker for broker in throttles.brokers if broker in running]
    await admin.incremental_alter_configs(topics=throttles.topics)
    await admin.incremental_alter_configs(brokers=dict.fromkeys(held, rate))
    click.echo(f"{as_count(held, 'broker')} held to {bytes_per_s:,} B/s for these moves", err=True)
    for broker in throttles.brokers:
        if broker not in running:
            click.echo(f"tidelog: warning: broker {broker} does not run: if it comes back, it is not held", err=True)


async def _verify(admin: Admin, plan: Plan, paths: Directories, preserve_throttles: bool, output_json: bool) -> int:
    assignment, moving = await _present_replicas(admin, plan), await admin.list_partition_reassignments()
    states = partition_lists.progress(plan, assignment, moving)
    if ELSEWHERE in states.values():
        # The controller may have completed a move that is not yet in the metadata of the queried broker.
        await asyncio.sleep(_HEARSAY_S)
        assignment = await _present_replicas(admin, plan)
        states = partition_lists.progress(plan, assignment, moving)
    moves = await reassign_directories.progress(admin, paths) if paths else {}
    if output_json:
        values: list[dict[str, object]] = [
            {"topic": topic, "partition": number, "state": state} for (topic, number), state in states.items()
        ]
        values += [{**one._asdict(), "log_dir": paths[one], "state": state} for one, state in moves.items()]
        print_json(values)
    else:
        print_table(
            ("TOPIC", "PARTITION", "STATE", "REPLICAS"),
            [(*partition, state, _ids(assignment.get(partition, ()))) for partition, state in states.items()],
        )
        if moves:
            rows = [(*one, state, paths[one]) for one, state in moves.items()]
            print_table(("TOPIC", "PARTITION", "BROKER", "STATE", "DIRECTORY"), rows)
    all_states = {*states.values(), *moves.values()}
    # The rates of brokers hold for moves of other plans as well.
    if not moving and not all_states & {MOVING, UNANSWERED} and not preserve_throttles:
        await _clear_throttles(admin, plan, assignment)
        await reassign_directories.release(admin, paths)
    return int(all_states != {COMPLETE})


async def _cancel(admin: Admin, plan: Plan, paths: Directories, preserve_throttles: bool) -> int:
    moving = await admin.list_partition_reassignments()
    outcomes = await admin.alter_partition_reassignments({partition: None for partition in plan if partition in moving})
    status = _report(outcomes, "cancelled", "cancel the move of")
    if paths:
        stopped, failure = await reassign_directories.cancel(admin, paths)
        status = status or failure
        click.echo(f"stopped {as_count(range(stopped), 'move')} between directories", err=True)
    if not status and not preserve_throttles:
        await _clear_throttles(admin, plan, await _present_replicas(admin, plan))
        await reassign_directories.release(admin, paths)
    return status


async def _list(admin: Admin, output_json: bool) -> int:
    moving = await admin.list_partition_reassignments()
    if output_json:
        print_json(
            [
                {
                    "topic": topic,
                    "partition": number,
                    "replicas": list(move.replicas),
                    "adding": list(move.adding),
                    "removing": list(move.removing),
                }
                for (topic, number), move in sorted(moving.items())
            ]
        )
    else:
        print_table(
            ("TOPIC", "PARTITION", "REPLICAS", "ADDING", "REMOVING"),
            [
                (*partition, _ids(move.replicas), _ids(move.adding), _ids(move.removing))
                for partition, move in sorted(moving.items())
            ],
        )
    return 0


async def _clear_throttles(admin: Admin, plan: Plan, assignment: Mapping[TopicPartition, tuple[int, ...]]) -> None:
    """Remove all throttles of the plan's topics and of all brokers, because the throttles do not record their moves."""
    topics = sorted({topic for topic, _ in plan if any(topic == known for known, _ in assignment)})
    brokers = [node.node_id for node in (await admin.describe_cluster()).nodes]
    set_somewhere = await admin.describe_configs(topics=topics, keys=_NO_THROTTLED_REPLICAS)
    changed = [name for name in topics if any(not entry.is_default for entry in set_somewhere[name].values())]
    if changed:
        await admin.incremental_alter_configs(topics=dict.fromkeys(changed, _NO_THROTTLED_REPLICAS))
        await admin.incremental_alter_configs(brokers=dict.fromkeys(brokers, _NO_RATE))
        click.echo(f"took away the throttles of {as_count(changed, 'topic')}", err=True)


def _report(outcomes: Mapping[TopicPartition, KafkaError | None], done: str, failing: str) -> int:
    """Print the refused partitions and the number of accepted ones. Returns the exit code."""
    refused = {partition: error for partition, error in outcomes.items() if error is not None}
    for partition, error in sorted(refused.items()):
        click.echo(f"tidelog: cannot {failing} {partition}: {error}", err=True)
    accepted = len(outcomes) - len(refused)
    click.echo(f"{done} {accepted} of {as_count(outcomes, 'move')}", err=True)
    return int(bool(refused))


def _ids(nodes: tuple[int, ...]) -> str:
    return ",".join(map(str, nodes)) or "-"
