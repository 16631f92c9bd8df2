"""`tidelog features`: describes, upgrades and downgrades the feature levels of a cluster."""

from __future__ import annotations

import click

from tidelog.cli.common import (
    HELP,
    CommandGroup,
    as_json,
    client_options,
    connecting,
    echo,
    key_values,
    print_json,
    print_table,
    run,
)
from tidelog.client import Admin
from tidelog.client.admin.features import SAFE_DOWNGRADE, UNSAFE_DOWNGRADE, UPGRADE
from tidelog.client.model import BrokerVersions
from tidelog.protocol.errors import ErrorCode, KafkaError

_FEATURES = click.option(
    "--feature",
    "levels",
    multiple=True,
    required=True,
    metavar="NAME=LEVEL",
    callback=lambda context, parameter, values: _levels(values),
    help="A feature and the level it shall have. May be given many times.",
)
_DRY_RUN = click.option("--dry-run", is_flag=True, help="Only ask whether it would be allowed.")


def _levels(values: tuple[str, ...]) -> dict[str, int]:
    levels = {}
    for name, level in key_values(values).items():
        if not level.isdecimal() or int(level) > 32767:
            raise click.BadParameter(f"{level!r} is not a level of {name}: a level is a whole number")
        levels[name] = int(level)
    return levels


@click.group("features", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """Describe the feature levels of the cluster, move them up or down.

    \b
    Example:
      tidelog features describe
    """


@command.command("describe")
@as_json
@connecting
def describe(bootstrap: str, properties: dict[str, str], json_wanted: bool) -> None:
    """Print each feature: the levels that the broker supports, and the one that the cluster uses.

    \b
    Example:
      tidelog features describe --json
    """

    async def ask() -> BrokerVersions:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            return await admin.describe_versions()

    versions = run(ask())
    names = sorted({*versions.supported_features, *versions.finalized_features})
    supported, finalized = versions.supported_features, versions.finalized_features
    if json_wanted:
        features = [
            {"feature": name, "supported": list(supported.get(name, ())), "finalized": finalized.get(name, 0)}
            for name in names
        ]
        print_json({"epoch": versions.finalized_epoch, "features": features})
        return
    rows = [(name, *(supported.get(name) or ("-", "-")), finalized.get(name, 0)) for name in names]
    print_table(("FEATURE", "LOWEST", "HIGHEST", "FINALIZED"), rows)


@command.command("upgrade")
@_FEATURES
@_DRY_RUN
@as_json
@connecting
def upgrade(
    bootstrap: str, properties: dict[str, str], levels: dict[str, int], dry_run: bool, json_wanted: bool
) -> None:
    """Move features up, all or none. Every node of the cluster has to support the new levels.

    \b
    Example:
      tidelog features upgrade --feature metadata.version=30 --dry-run
    """
    _update(bootstrap, properties, levels, UPGRADE, dry_run=dry_run, json_wanted=json_wanted)


@command.command("downgrade")
@_FEATURES
@click.option("--unsafe", is_flag=True, help="Also where metadata would be lost.")
@_DRY_RUN
@as_json
@connecting
def downgrade(
    bootstrap: str, properties: dict[str, str], levels: dict[str, int], unsafe: bool, dry_run: bool, json_wanted: bool
) -> None:
    """Move features down, all or none; level 0 takes a feature out of use.

    \b
    Example:
      tidelog features downgrade --feature eligible.leader.replicas.version=0
    """
    kind = UNSAFE_DOWNGRADE if unsafe else SAFE_DOWNGRADE
    _update(bootstrap, properties, levels, kind, dry_run=dry_run, json_wanted=json_wanted)


def _update(
    bootstrap: str,
    properties: dict[str, str],
    levels: dict[str, int],
    upgrade_type: int,
    *,
    dry_run: bool,
    json_wanted: bool,
) -> None:
    async def ask() -> None:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            supported = (await admin.describe_versions()).supported_features
            for name in levels:
                if name not in supported:
                    known = ", ".join(sorted(supported)) or "none"
                    raise KafkaError(ErrorCode.INVALID_UPDATE_VERSION, f"no feature {name!r}: there are {known}")
            await admin.update_features(levels, upgrade_type=upgrade_type, validate_only=dry_run)

    run(ask())
    if json_wanted:
        print_json({"features": levels, "outcome": "would be finalized" if dry_run else "finalized"})
        return
    for name, level in levels.items():
        echo(f"{name} {'would be' if dry_run else 'is'} at level {level}.")
