"""`tidelog format`: writes the cluster id and the first voters to a node's directories.

A single node formats its directories by itself. The nodes of a cluster need the same cluster id beforehand, as in
Kafka.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidelog.broker.config.node_config import NodeConfig
from tidelog.cli.cluster.state import refuse_cluster_directories
from tidelog.cli.common import HELP, as_json, echo, fail, overriding, print_json
from tidelog.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tidelog.replication.ports import Endpoint
    from tidelog.replication.quorum.raft.voters import Voter

_FIRST_VOTER = "ID@HOST:PORT:DIRECTORY-ID"


@click.command("format", context_settings=HELP)
@click.argument("file", required=False, type=click.Path())
@click.option("-t", "--cluster-id", metavar="ID", help="The cluster's id; without it a new one is made and printed.")
@click.option("-s", "--standalone", is_flag=True, help="This controller is the first voter; others are added later.")
@click.option(
    "-I",
    "--initial-controllers",
    metavar=f"{_FIRST_VOTER},...",
    help="These controllers are the first voters; the same for each of them.",
)
@overriding("One configuration value, by Kafka's name; wins over FILE.")
@as_json
def command(
    file: str | None,
    cluster_id: str | None,
    standalone: bool,
    initial_controllers: str | None,
    overrides: dict[str, str],
    json_wanted: bool,
) -> int:
    """Format the data directories of a node that will be part of a cluster, and print the cluster's id.

    Directories that are formatted already are left alone, if they belong to the same cluster and node.

    Voters are either those of controller.quorum.voters, for good, or, with --standalone or --initial-controllers, those
    that `tidelog quorum` adds and removes; then every node needs controller.quorum.bootstrap.servers.

    \b
    Example, for the nodes of one cluster:
      ID=$(tidelog format node1.yaml)
      tidelog format node2.yaml --cluster-id $ID
    """
    from tidelog.protocol.uuids import uuid_from_text
    from tidelog.storage.files.disk import DirectoryInUse
    from tidelog.storage.files.meta_properties import ForeignDirectory

    try:
        if cluster_id is not None:
            uuid_from_text(cluster_id)
    except ValueError:
        return fail(f"{cluster_id!r} is no cluster id: it must be 16 bytes in URL-safe base64, 22 characters")
    try:
        config = NodeConfig.load(Path(file) if file is not None else None, overrides)
        refuse_cluster_directories(config.log_dirs)
        voters: list[Voter] = []
        if standalone or initial_controllers is not None:
            _check_quorum(config)
        if initial_controllers is not None:
            voters = _first_voters(initial_controllers, config.items("controller.listener.names")[0].upper())
            _check_voters(config, standalone, voters)
        formatted = _format(config, cluster_id, standalone, voters)
    except (ConfigError, DirectoryInUse, ForeignDirectory) as error:
        return fail(str(error))
    if json_wanted:
        print_json(formatted)
    else:
        echo(formatted["cluster_id"])
    return 0


def _format(config: NodeConfig, cluster_id: str | None, standalone: bool, voters: list[Voter]) -> dict[str, Any]:
    """Format the directories. Returns the result for `--json`, and prints it on standard error for users."""
    from tidelog.protocol.uuids import uuid_to_text
    from tidelog.replication.quorum.files.initial_voters import write_initial_voters
    from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterSet
    from tidelog.storage.files.disk import OsDisk
    from tidelog.storage.log.directory import LogDirectory

    disk, home = OsDisk(), str(config.metadata_log_dir)
    own_directory = next((voter.key.directory_id for voter in voters if voter.key.id == config.node_id), None)
    directories = {}
    for path in dict.fromkeys([home, *map(str, config.log_dirs)]):
        directory_id = uuid_to_text(own_directory) if own_directory is not None and path == home else None
        directory = LogDirectory.open(
            disk, path, node_id=config.node_id, cluster_id=cluster_id, directory_id=directory_id
        )
        cluster_id = directory.cluster_id
        directory.close(directory.clean_broker_epoch)
        directories[path] = uuid_to_text(directory.directory_id)
        click.echo(f"{path}: node {config.node_id} of cluster {cluster_id}", err=True)
        if path == home and standalone:
            voters = [Voter(ReplicaKey(config.node_id, directory.directory_id), _own_endpoints(config))]
    ids = [voter.key.id for voter in voters]
    if voters and not write_initial_voters(disk, home, VoterSet(voters), int(time.time() * 1000)):
        click.echo(f"{home}: its quorum has begun already, and keeps its voters", err=True)
        ids = []
    elif voters:
        click.echo(f"{home}: first voters {', '.join(map(str, ids))}", err=True)
    return {"cluster_id": cluster_id, "node_id": config.node_id, "directories": directories, "first_voters": ids}


def _first_voters(text: str, listener: str) -> list[Voter]:
    """Raises ConfigError."""
    from tidelog.protocol.uuids import uuid_from_text
    from tidelog.replication.ports import Endpoint
    from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter

    voters = []
    for item in text.split(","):
        node_id, at, address = item.strip().partition("@")
        where, _, directory_id = address.rpartition(":")
        host, _, port = where.rpartition(":")
        try:
            if not (at and node_id.isdecimal() and host and port.isdecimal() and int(port) < 65536):
                raise ValueError
            key = ReplicaKey(int(node_id), uuid_from_text(directory_id))
        except ValueError:
            raise ConfigError(f"--initial-controllers: {item!r} is not of the form {_FIRST_VOTER}") from None
        voters.append(Voter(key, ((listener, Endpoint(host.strip("[]"), int(port))),)))
    if len({voter.key.id for voter in voters}) < len(voters):
        raise ConfigError("--initial-controllers: a node is there twice")
    return voters


def _own_endpoints(config: NodeConfig) -> tuple[tuple[str, Endpoint], ...]:
    from tidelog.broker.metadata_wiring import controller_endpoints
    from tidelog.replication.ports import Endpoint

    return tuple((one.name, Endpoint(one.host, one.port)) for one in controller_endpoints(config, {}))


def _check_voters(config: NodeConfig, standalone: bool, voters: list[Voter]) -> None:
    """Raises ConfigError."""
    if standalone:
        raise ConfigError("--standalone and --initial-controllers exclude each other")
    if config.node_id not in {voter.key.id for voter in voters}:
        raise ConfigError(f"--initial-controllers does not name this node, {config.node_id}")


def _check_quorum(config: NodeConfig) -> None:
    """Raises ConfigError for first voters if the node's configuration does not allow a quorum with dynamic voters."""
    if config.quorum_voters:
        raise ConfigError("controller.quorum.voters names the voters for good; use controller.quorum.bootstrap.servers")
    if not config.quorum_bootstrap:
        raise ConfigError("controller.quorum.bootstrap.servers must say where the first voters are")
    if not config.is_controller:
        raise ConfigError("only a node with the controller role can vote")
    if not config.items("controller.listener.names"):
        raise ConfigError("controller.listener.names must name the listener of the controllers")
