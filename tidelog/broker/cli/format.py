"""`tidelog format`: give a node's directories the cluster id that all nodes of its cluster share.

A node that is alone formats its directories by itself; nodes of a cluster must agree beforehand, as in Kafka.
"""

from __future__ import annotations

from pathlib import Path

import click

from tidelog.broker.cli.common import HELP, fail, key_values
from tidelog.broker.config import ConfigError, NodeConfig


@click.command("format", context_settings=HELP)
@click.argument("file", required=False, type=click.Path())
@click.option("-t", "--cluster-id", metavar="ID", help="The cluster's id; without it a new one is made and printed.")
@click.option(
    "-o",
    "--override",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    callback=lambda context, parameter, values: key_values(values),
    help="One configuration value, by Kafka's name; wins over FILE. May be given many times.",
)
def command(file: str | None, cluster_id: str | None, overrides: dict[str, str]) -> int:
    """Format the data directories of a node that will be part of a cluster.

    Directories that are formatted already are left alone, if they belong to the same cluster and node.

    \b
    Example, for the nodes of one cluster:
      tidelog format node1.yaml
      tidelog format node2.yaml --cluster-id 0XP3lYbQSHSPjHDVXXXXXX
    """
    from tidelog.protocol.uuids import uuid_from_text
    from tidelog.storage.disk import DirectoryInUse, OsDisk
    from tidelog.storage.log_directory import ForeignDirectory, LogDirectory

    try:
        if cluster_id is not None:
            uuid_from_text(cluster_id)
    except ValueError:
        return fail(f"{cluster_id!r} is no cluster id: it must be 16 bytes in URL-safe base64, 22 characters")
    try:
        config = NodeConfig.load(Path(file) if file is not None else None, overrides)
        for path in dict.fromkeys(map(str, [config.metadata_log_dir, *config.log_dirs])):
            directory = LogDirectory.open(OsDisk(), path, node_id=config.node_id, cluster_id=cluster_id)
            cluster_id = directory.cluster_id
            directory.close()
            click.echo(f"{path}: node {config.node_id} of cluster {cluster_id}")
    except (ConfigError, DirectoryInUse, ForeignDirectory) as error:
        return fail(str(error))
    return 0
