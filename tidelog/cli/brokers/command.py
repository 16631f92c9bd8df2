"""`tidelog brokers`: lists and describes the brokers of a cluster, and ends the registration of one that is gone."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click

from tidelog.cli.common import (
    HELP,
    CommandGroup,
    IntegerRange,
    as_bytes,
    as_json,
    client_options,
    connecting,
    echo,
    fail,
    print_json,
    print_table,
    run,
)
from tidelog.client import Admin
from tidelog.client.model import BrokerVersions, LogDirDescription, Node, TopicDescription
from tidelog.protocol.addresses import address_text
from tidelog.protocol.api import api_name
from tidelog.protocol.errors import ErrorCode, KafkaError


@dataclass(slots=True)
class Broker:
    """The data of one broker; `problem`: the reason why the rest is empty."""

    node: Node
    roles: list[str] = field(default_factory=list)
    is_quorum_leader: bool = False
    leaders: int = 0
    replicas: int = 0
    log_dirs: list[LogDirDescription] = field(default_factory=list)
    versions: BrokerVersions | None = None
    problem: str | None = None

    @property
    def state(self) -> str:
        return "fenced" if self.node.fenced else "unreachable" if self.problem else "running"

    @property
    def log_bytes(self) -> int:
        return sum(each.size_bytes for directory in self.log_dirs for each in directory.replicas)


@click.group("brokers", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """List and describe brokers; end the registration of one that is gone.

    \b
    Example:
      tidelog brokers list
      tidelog brokers describe 1
    """


@command.command("list")
@as_json
@connecting
def list_brokers(bootstrap: str, properties: dict[str, str], json_wanted: bool) -> int:
    """Print a line for each broker: address, rack, roles, and what it holds.

    The controller that leads the metadata quorum is marked with a star. Controllers that are no brokers are shown by
    `tidelog quorum describe`.

    \b
    Example:
      tidelog brokers list -b 127.0.0.1:9092
    """
    brokers, failed = run(_ask(bootstrap, properties, None, versions=False))
    if json_wanted:
        print_json([_as_dict(each) for each in brokers])
        return _without_roles(failed)
    rows = [
        (
            each.node.node_id,
            address_text(each.node.host, each.node.port),
            each.node.rack or "-",
            (",".join(each.roles) or "-") + ("*" if each.is_quorum_leader else ""),
            each.state,
            each.leaders,
            each.replicas,
            "-" if each.state != "running" else as_bytes(each.log_bytes),
        )
        for each in brokers
    ]
    print_table(("BROKER", "ADDRESS", "RACK", "ROLES", "STATE", "LEADERS", "REPLICAS", "LOGS"), rows)
    return _without_roles(failed)


@command.command("describe")
@click.argument("ids", nargs=-1, type=IntegerRange(0))
@click.option("--api-versions", is_flag=True, help="Also the versions of each API that it serves.")
@as_json
@connecting
def describe(
    ids: tuple[int, ...], bootstrap: str, properties: dict[str, str], api_versions: bool, json_wanted: bool
) -> int:
    """Print all that is known of the brokers IDS, of all brokers without IDS.

    \b
    Examples:
      tidelog brokers describe 1 --api-versions
      tidelog brokers describe --json
    """
    brokers, failed = run(_ask(bootstrap, properties, ids or None, versions=True))
    if json_wanted:
        print_json([_as_dict(each) for each in brokers])
    else:
        for number, each in enumerate(brokers):
            if number:
                echo()
            _print_broker(each, api_versions)
    return max(_without_roles(failed), *(int(each.problem is not None) for each in brokers))


@command.command("unregister")
@click.argument("broker_id", type=IntegerRange(0))
@as_json
@connecting
def unregister(broker_id: int, bootstrap: str, properties: dict[str, str], json_wanted: bool) -> None:
    """End the registration of the broker BROKER_ID, which does not run any more.

    Move its partitions away before it is stopped: `tidelog reassign`.

    \b
    Example:
      tidelog brokers unregister 4
    """

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            nodes = {each.node_id: each for each in (await admin.describe_cluster(include_fenced=True)).nodes}
            if broker_id in nodes and not nodes[broker_id].fenced:
                raise click.ClickException(f"broker {broker_id} runs: stop it before its registration ends")
            await admin.unregister_broker(broker_id)

    run(ask())
    if json_wanted:
        print_json({"broker": broker_id, "outcome": "unregistered"})
    else:
        echo(f"Broker {broker_id} is not registered any more.")


async def _ask(
    bootstrap: str, properties: dict[str, str], ids: tuple[int, ...] | None, *, versions: bool
) -> tuple[list[Broker], KafkaError | None]:
    """The brokers, and why their roles are not known."""
    async with Admin(**client_options(bootstrap, properties)) as admin:
        nodes = (await admin.describe_cluster(include_fenced=True)).nodes
        unknown = set(ids or ()) - {node.node_id for node in nodes}
        if unknown:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, f"there is no broker {min(unknown)}")
        brokers = {node.node_id: Broker(node) for node in sorted(nodes, key=lambda node: node.node_id)}
        _count(brokers, await admin.describe_topics())
        chosen = [each for id_, each in brokers.items() if ids is None or id_ in ids]
        await asyncio.gather(*(_look_at(admin, each, versions) for each in chosen if not each.node.fenced))
        # This comes last: without a leader of the quorum a broker keeps the question, and all that come behind it.
        return chosen, await _add_roles(admin, brokers)


async def _add_roles(admin: Admin, brokers: dict[int, Broker]) -> KafkaError | None:
    """Add what the leader of the metadata quorum knows. Returns the error if it has not answered."""
    try:
        quorum = await admin.describe_quorum()
    except KafkaError as error:
        if error.code is not ErrorCode.UNSUPPORTED_VERSION:
            return error
        voters, leader_id = set(), -1  # a cluster without a metadata quorum
    else:
        voters, leader_id = {each.node_id for each in quorum.voters}, quorum.leader_id
    for broker_id, each in brokers.items():
        each.roles = ["broker", "controller"] if broker_id in voters else ["broker"]
        each.is_quorum_leader = broker_id == leader_id
    return None


def _without_roles(error: KafkaError | None) -> int:
    """Print why the roles are not known. Returns the exit code."""
    if error is None:
        return 0
    if not error.retriable:  # it has answered: this client may not ask, for example
        return fail(f"without the roles: {error}")
    return fail(
        f"{error.code.name}: without the roles: the metadata quorum does not answer, the logs of its nodes say why"
    )


def _count(brokers: dict[int, Broker], topics: dict[str, TopicDescription]) -> None:
    partitions = [partition for topic in topics.values() for partition in topic.partitions]
    leaders = Counter(each.leader for each in partitions)
    replicas = Counter(replica for each in partitions for replica in each.replicas)
    for broker_id, broker in brokers.items():
        broker.leaders, broker.replicas = leaders[broker_id], replicas[broker_id]


async def _look_at(admin: Admin, broker: Broker, versions: bool) -> None:
    """Add the data that only the broker itself knows. A broker that does not answer only gets a `problem`."""
    broker_id = broker.node.node_id
    try:
        broker.log_dirs = (await admin.describe_log_dirs([broker_id]))[broker_id]
        if versions:
            broker.versions = await admin.describe_versions(broker_id)
    except KafkaError as error:
        broker.problem = str(error)


def _print_broker(broker: Broker, api_versions: bool) -> None:
    node = broker.node
    lines: list[tuple[str, object]] = [
        ("broker", node.node_id),
        ("address", address_text(node.host, node.port)),
        ("rack", node.rack or "-"),
        (
            "roles",
            (", ".join(broker.roles) or "-") + (" (leads the metadata quorum)" if broker.is_quorum_leader else ""),
        ),
        ("state", broker.state + (f": {broker.problem}" if broker.problem else "")),
        ("leaders", broker.leaders),
        ("replicas", broker.replicas),
    ]
    for directory in broker.log_dirs:
        used = as_bytes(sum(each.size_bytes for each in directory.replicas))
        room = f", {as_bytes(directory.usable_bytes)} free" if directory.usable_bytes >= 0 else ""
        lines.append(("log directory", f"{directory.path} ({directory.error or used + room})"))
    if broker.versions is not None:
        finalized = broker.versions.finalized_features
        for name, (low, high) in sorted(broker.versions.supported_features.items()):
            lines.append(("feature", f"{name} {low} to {high}, now {finalized.get(name, 0)}"))
    for name, value in lines:
        echo(f"{name + ':':<16}{value}")
    if api_versions and broker.versions is not None:
        rows = [(key, api_name(key), low, high) for key, (low, high) in sorted(broker.versions.apis.items())]
        print_table(("KEY", "API", "MIN", "MAX"), rows)


def _as_dict(broker: Broker) -> dict[str, Any]:
    node, versions = broker.node, broker.versions
    shown: dict[str, Any] = {
        "broker": node.node_id,
        "host": node.host,
        "port": node.port,
        "rack": node.rack,
        "roles": broker.roles,
        "leads_quorum": broker.is_quorum_leader,
        "state": broker.state,
        "leaders": broker.leaders,
        "replicas": broker.replicas,
        "log_bytes": None if broker.problem or node.fenced else broker.log_bytes,
        "log_dirs": [
            {
                "log_dir": each.path,
                "error": None if each.error is None else each.error.code.name,
                "size_bytes": sum(replica.size_bytes for replica in each.replicas),
                "total_bytes": each.total_bytes,
                "usable_bytes": each.usable_bytes,
            }
            for each in broker.log_dirs
        ],
    }
    if broker.problem:
        shown["problem"] = broker.problem
    if versions is not None:
        shown["features"] = {
            name: {"min": low, "max": high, "finalized": versions.finalized_features.get(name, 0)}
            for name, (low, high) in sorted(versions.supported_features.items())
        }
        shown["api_versions"] = {api_name(key): [low, high] for key, (low, high) in sorted(versions.apis.items())}
    return shown
