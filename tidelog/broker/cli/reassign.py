"""`tidelog reassign`: move partitions between brokers, by the plans of Kafka's kafka-reassign-partitions.

What a plan is and means is in `partition_lists`; here it is carried out, and told about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import click

from tidelog.broker.cli import partition_lists
from tidelog.broker.cli.common import HELP, as_count, client_options, connecting, print_json, print_table, run
from tidelog.broker.cli.partition_lists import COMPLETE, ELSEWHERE, MOVING, Plan
from tidelog.client import Admin, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError

_HEARSAY_S = 0.3
_NO_THROTTLED_REPLICAS: dict[str, str | None] = {
    partition_lists.LEADER_THROTTLE: None,
    partition_lists.FOLLOWER_THROTTLE: None,
}
_NO_RATE: dict[str, str | None] = {partition_lists.LEADER_RATE: None, partition_lists.FOLLOWER_RATE: None}


@click.command("reassign", context_settings=HELP)
@click.option("--json", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The plan.")
@click.option("--execute", "action", flag_value="execute", help="Start the moves of the plan.")
@click.option("--verify", "action", flag_value="verify", help="Say how far they are; exit code 1 until all are done.")
@click.option("--cancel", "action", flag_value="cancel", help="Stop them, and go back to where each began.")
@click.option("--list", "action", flag_value="list", help="Say which partitions are being moved, of any plan.")
@click.option("--throttle", type=click.IntRange(1), metavar="BYTES", help="--execute: at most so much a second.")
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
    additional: bool,
    preserve_throttles: bool,
    output_json: bool,
) -> int:
    """Move partitions to other brokers, as a plan says.

    A plan is what Kafka's own tool reads:
    {"version":1,"partitions":[{"topic":"flights","partition":0,"replicas":[2,3,4]}]}.
    --execute first prints the plan for the way back. Run --verify until all is done: it takes the throttles away.

    \b
    Example:
      tidelog reassign --json plan.json --execute --throttle 50000000
      tidelog reassign --json plan.json --verify
    """
    if action is None:
        raise click.UsageError("one of --execute, --verify, --cancel, --list is wanted")
    if (file is None) != (action == "list"):
        raise click.UsageError(f"--{action} {'reads no plan' if file else 'wants a plan: --json FILE'}")

    async def ask() -> int:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            if action == "list" or file is None:
                return await _list(admin, output_json)
            plan = _read(file)
            if action == "execute":
                return await _execute(admin, plan, throttle, additional)
            if action == "verify":
                return await _verify(admin, plan, preserve_throttles, output_json)
            return await _cancel(admin, plan, preserve_throttles)

    return run(ask())


def _read(path: Path) -> Plan:
    try:
        return partition_lists.plan_in(path.read_text())
    except (partition_lists.ListError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from None


async def _placed(admin: Admin, plan: Plan) -> dict[TopicPartition, tuple[int, ...]]:
    """Where all partitions of the plan's topics are now; topics that are not there are left out."""
    wanted = {topic for topic, _ in plan}
    described = await admin.describe_topics()
    return partition_lists.current({name: topic for name, topic in described.items() if name in wanted})


async def _execute(admin: Admin, plan: Plan, throttle: int | None, additional: bool) -> int:
    placed, moving = await _placed(admin, plan), await admin.list_partition_reassignments()
    missing = [str(partition) for partition in plan if partition not in placed]
    if missing:
        raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ", ".join(missing))
    known = {node.node_id for node in (await admin.describe_cluster(include_fenced=True)).nodes}
    strangers = {replica for replicas in plan.values() for replica in replicas} - known
    if strangers:
        raise click.ClickException(f"no such brokers: {', '.join(map(str, sorted(strangers)))}")
    if moving and not additional:
        raise click.ClickException(f"already moving {as_count(moving, 'partition')}; --additional adds to them")
    click.echo(partition_lists.as_plan({partition: placed[partition] for partition in plan}))
    if throttle is not None:
        topics, brokers = partition_lists.throttles(plan, placed, moving)
        rate: dict[str, str | None] = {
            partition_lists.LEADER_RATE: str(throttle),
            partition_lists.FOLLOWER_RATE: str(throttle),
        }
        if topics:
            await admin.incremental_alter_configs(topics=topics)
            await admin.incremental_alter_configs(brokers=dict.fromkeys(brokers, rate))
            click.echo(f"{as_count(brokers, 'broker')} held to {throttle:,} B/s for these moves", err=True)
    outcomes = await admin.alter_partition_reassignments(plan)
    return _told(outcomes, "started", "move")


async def _verify(admin: Admin, plan: Plan, preserve_throttles: bool, output_json: bool) -> int:
    placed, moving = await _placed(admin, plan), await admin.list_partition_reassignments()
    states = partition_lists.progress(plan, placed, moving)
    if ELSEWHERE in states.values():
        # The controller may have ended a move that the broker asked has not heard of yet.
        await asyncio.sleep(_HEARSAY_S)
        placed = await _placed(admin, plan)
        states = partition_lists.progress(plan, placed, moving)
    if output_json:
        print_json([{"topic": topic, "partition": number, "state": state} for (topic, number), state in states.items()])
    else:
        print_table(
            ("TOPIC", "PARTITION", "STATE", "REPLICAS"),
            [(*partition, state, _ids(placed.get(partition, ()))) for partition, state in states.items()],
        )
    if MOVING not in states.values() and not preserve_throttles:
        await _clear_throttles(admin, plan, placed)
    return int(any(state != COMPLETE for state in states.values()))


async def _cancel(admin: Admin, plan: Plan, preserve_throttles: bool) -> int:
    moving = await admin.list_partition_reassignments()
    outcomes = await admin.alter_partition_reassignments({partition: None for partition in plan if partition in moving})
    status = _told(outcomes, "cancelled", "cancel the move of")
    if not status and not preserve_throttles:
        await _clear_throttles(admin, plan, await _placed(admin, plan))
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


async def _clear_throttles(admin: Admin, plan: Plan, placed: Mapping[TopicPartition, tuple[int, ...]]) -> None:
    """All of them: which broker was held back for what cannot be told any more."""
    topics = sorted({topic for topic, _ in plan if any(topic == known for known, _ in placed)})
    brokers = [node.node_id for node in (await admin.describe_cluster()).nodes]
    set_somewhere = await admin.describe_configs(topics=topics, keys=_NO_THROTTLED_REPLICAS)
    changed = [name for name in topics if any(not entry.is_default for entry in set_somewhere[name].values())]
    if changed:
        await admin.incremental_alter_configs(topics=dict.fromkeys(changed, _NO_THROTTLED_REPLICAS))
        await admin.incremental_alter_configs(brokers=dict.fromkeys(brokers, _NO_RATE))
        click.echo(f"took away the throttles of {as_count(changed, 'topic')}", err=True)


def _told(outcomes: Mapping[TopicPartition, KafkaError | None], done: str, failing: str) -> int:
    """Says which partitions were refused and how many were not; the exit code."""
    refused = {partition: error for partition, error in outcomes.items() if error is not None}
    for partition, error in sorted(refused.items()):
        click.echo(f"tidelog: cannot {failing} {partition}: {error}", err=True)
    accepted = len(outcomes) - len(refused)
    click.echo(f"{done} {accepted} of {as_count(outcomes, 'move')}", err=True)
    return int(bool(refused))


def _ids(nodes: tuple[int, ...]) -> str:
    return ",".join(map(str, nodes)) or "-"
