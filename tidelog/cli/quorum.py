"""`tidelog quorum`: describes the metadata quorum, and adds and removes voters."""

from __future__ import annotations

import time
from typing import Any

import click

from tidelog.cli.common import (
    HELP,
    CommandGroup,
    IntegerRange,
    alternative,
    as_json,
    client_options,
    connecting,
    echo,
    print_json,
    print_table,
    run,
)
from tidelog.client import Admin
from tidelog.client.model import QuorumDescription, QuorumReplica
from tidelog.protocol.addresses import address_text
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.uuids import uuid_from_text, uuid_to_text

_NO_DIRECTORY = bytes(16)


@click.group("quorum", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """Describe the metadata quorum; add and remove voters.

    \b
    Example:
      tidelog quorum describe --replication
    """


@command.command("describe")
@alternative("--status", "view", "status", "Leader, epoch, voters (default).")
@alternative("--replication", "view", "replication", "How far each replica is.")
@as_json
@connecting
def describe(bootstrap: str, properties: dict[str, str], view: str | None, json_wanted: bool) -> None:
    """Print the leader, the voters and the observers of the metadata quorum.

    \b
    Example:
      tidelog quorum describe --status
    """

    async def ask() -> tuple[str | None, QuorumDescription]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            cluster_id = (await admin.describe_cluster()).cluster_id
            try:
                return cluster_id, await admin.describe_quorum()
            except KafkaError as error:
                if error.code is not ErrorCode.REQUEST_TIMED_OUT:
                    raise
                problem = "the metadata quorum does not answer, it may have no leader; the logs of its nodes say why"
                raise KafkaError(error.code, problem) from None

    cluster_id, quorum = run(ask())
    if json_wanted:
        print_json(_as_dict(cluster_id, quorum))
    elif view == "replication":
        _print_replication(quorum)
    else:
        _print_status(cluster_id, quorum)


@command.command("add-voter")
@click.argument("node_id", type=IntegerRange(0))
@click.argument("directory_id")
@click.argument("endpoints", nargs=-1, required=True, metavar="LISTENER://HOST:PORT...")
@as_json
@connecting
def add_voter(
    node_id: int,
    directory_id: str,
    endpoints: tuple[str, ...],
    bootstrap: str,
    properties: dict[str, str],
    json_wanted: bool,
) -> None:
    """Make the running controller NODE_ID a voter. DIRECTORY_ID is in its meta.properties.

    \b
    Example:
      tidelog quorum add-voter 4 RqQHz8t9S6-qNrT9f3RzXA CONTROLLER://127.0.0.1:9096
    """
    addresses = [_endpoint(each) for each in endpoints]

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            await admin.add_raft_voter(node_id, _directory(directory_id), addresses)

    run(ask())
    if json_wanted:
        print_json({"node_id": node_id, "directory_id": directory_id, "outcome": "added"})
    else:
        echo(f"Node {node_id} votes.")


@command.command("remove-voter")
@click.argument("node_id", type=IntegerRange(0))
@click.argument("directory_id")
@as_json
@connecting
def remove_voter(
    node_id: int, directory_id: str, bootstrap: str, properties: dict[str, str], json_wanted: bool
) -> None:
    """Let the voter NODE_ID vote no longer. Its DIRECTORY_ID: see `quorum describe`.

    \b
    Example:
      tidelog quorum remove-voter 4 RqQHz8t9S6-qNrT9f3RzXA
    """

    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            await admin.remove_raft_voter(node_id, _directory(directory_id))

    run(ask())
    if json_wanted:
        print_json({"node_id": node_id, "directory_id": directory_id, "outcome": "removed"})
    else:
        echo(f"Node {node_id} does not vote any more.")


def _directory(text: str) -> bytes:
    try:
        return uuid_from_text(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a directory id") from None


def _endpoint(text: str) -> tuple[str, str, int]:
    name, scheme, address = text.partition("://")
    host, colon, port = address.rpartition(":")
    if not (name and scheme and host and colon and port.isdecimal() and int(port) < 65536):
        raise click.BadParameter(f"{text!r} is not LISTENER://HOST:PORT")
    return name, host.strip("[]"), int(port)


def _leader_end_offset(quorum: QuorumDescription) -> int:
    return next((each.log_end_offset for each in quorum.voters if each.node_id == quorum.leader_id), -1)


def _print_status(cluster_id: str | None, quorum: QuorumDescription) -> None:
    end_offset = _leader_end_offset(quorum)
    lag = max((end_offset - each.log_end_offset for each in quorum.voters), default=0)
    lines = (
        ("cluster id", cluster_id),
        ("leader", quorum.leader_id),
        ("leader epoch", quorum.leader_epoch),
        ("high watermark", quorum.high_watermark),
        ("log end offset", end_offset),
        ("largest lag of a voter", lag),
        ("voters", _names_of(quorum, quorum.voters)),
        ("observers", _names_of(quorum, quorum.observers)),
    )
    for name, value in lines:
        echo(f"{name + ':':<24}{value}")


def _names_of(quorum: QuorumDescription, replicas: tuple[QuorumReplica, ...]) -> str:
    names = []
    for each in sorted(replicas, key=lambda replica: replica.node_id):
        addresses = [address_text(host, port) for _, host, port in quorum.endpoints.get(each.node_id, ())]
        names.append(f"{each.node_id} ({', '.join(addresses)})" if addresses else str(each.node_id))
    return ", ".join(names) or "none"


def _print_replication(quorum: QuorumDescription) -> None:
    now_ms = int(time.time() * 1000)
    print_table(
        ("NODE", "ROLE", "END OFFSET", "LAG", "FETCHED", "CAUGHT UP", "DIRECTORY"),
        [
            (
                replica.node_id,
                role,
                replica.log_end_offset,
                _leader_end_offset(quorum) - replica.log_end_offset,
                _ago(now_ms, replica.last_fetch_ms),
                _ago(now_ms, replica.last_caught_up_ms),
                "-" if replica.directory_id == _NO_DIRECTORY else uuid_to_text(replica.directory_id),
            )
            for role, replica in _roles(quorum)
        ],
    )


def _roles(quorum: QuorumDescription) -> list[tuple[str, QuorumReplica]]:
    """(role, replica) of all replicas: the leader first, then other voters, then observers."""
    voters = sorted(quorum.voters, key=lambda each: (each.node_id != quorum.leader_id, each.node_id))
    roles = [("leader" if each.node_id == quorum.leader_id else "follower", each) for each in voters]
    return roles + [("observer", each) for each in sorted(quorum.observers, key=lambda each: each.node_id)]


def _ago(now_ms: int, then_ms: int) -> str:
    return "-" if then_ms < 0 else f"{max(0, now_ms - then_ms):,} ms ago"


def _as_dict(cluster_id: str | None, quorum: QuorumDescription) -> dict[str, Any]:
    return {
        "cluster_id": cluster_id,
        "leader_id": quorum.leader_id,
        "leader_epoch": quorum.leader_epoch,
        "high_watermark": quorum.high_watermark,
        "replicas": [
            {
                "node_id": replica.node_id,
                "role": role,
                "directory_id": uuid_to_text(replica.directory_id),
                "log_end_offset": replica.log_end_offset,
                "lag": _leader_end_offset(quorum) - replica.log_end_offset,
                "last_fetch_ms": replica.last_fetch_ms,
                "last_caught_up_ms": replica.last_caught_up_ms,
                "endpoints": [
                    f"{name}://{address_text(host, port)}"
                    for name, host, port in quorum.endpoints.get(replica.node_id, ())
                ],
            }
            for role, replica in _roles(quorum)
        ],
    }
