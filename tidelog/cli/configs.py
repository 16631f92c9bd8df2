"""`tidelog configs`: describes and alters configs of topics, brokers, loggers, groups and metrics subscriptions.

It uses the admin client, so it works with any Kafka-compatible cluster. The cluster validates the values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import click

from tidelog.broker.config.node_config import FREE_PREFIXES
from tidelog.cli.common import (
    HELP,
    CommandGroup,
    answered_by_brokers,
    as_json,
    change_each,
    client_options,
    connecting,
    echo,
    key_value_option,
    print_json,
    print_table,
    require_running,
    run,
)
from tidelog.client import Admin
from tidelog.client.admin.configs import APPEND, DELETE, SUBTRACT, ConfigChange, ConfigResource
from tidelog.client.arguments import INT32_MAX
from tidelog.client.model import ConfigEntry

# The commands' name of a resource kind -> the client's name.
_KINDS = {
    "topics": "topic",
    "brokers": "broker",
    "broker-loggers": "broker-logger",
    "groups": "group",
    "client-metrics": "client-metrics",
}
# The sources of values in DescribeConfigs.
_SOURCES = {
    1: "topic",
    2: "broker",
    3: "all brokers",
    4: "file",
    5: "default",
    6: "logger",
    7: "subscription",
    8: "group",
}
_SET_HERE = {"topic": (1,), "broker": (2, 3), "broker-logger": (6,), "group": (8,), "client-metrics": (7,)}

_KIND = click.argument("kind", type=click.Choice(list(_KINDS)), metavar="|".join(_KINDS))
_FOR_ALL_BROKERS = click.option("--default", "for_all", is_flag=True, help="What holds for all brokers, not for one.")


@click.group("configs", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """Describe and alter configs of topics, brokers and their loggers, groups and metrics subscriptions.

    \b
    Example:
      tidelog configs describe topics flights --all
      tidelog configs alter brokers --default --set log.retention.ms=3600000
    """


@command.command("describe")
@_KIND
@click.argument("names", nargs=-1)
@_FOR_ALL_BROKERS
@click.option("-a", "--all", "everything", is_flag=True, help="Also what comes from files and from defaults.")
@click.option("-k", "--key", "keys", multiple=True, metavar="KEY", help="Only this config. May be given many times.")
@as_json
@connecting
def describe(
    kind: str,
    names: tuple[str, ...],
    bootstrap: str,
    properties: dict[str, str],
    for_all: bool,
    everything: bool,
    keys: tuple[str, ...],
    json_wanted: bool,
) -> int:
    """Print the dynamic configs of NAMES, or of all resources of that kind.

    \b
    Example:
      tidelog configs describe topics
      tidelog configs describe topics flights --all --json
      tidelog configs describe brokers 1 --key log.retention.ms --all
      tidelog configs describe brokers --default
      tidelog configs describe broker-loggers 1
    """

    warn_of_unknown(kind, keys)

    async def ask() -> tuple[dict[ConfigResource, dict[str, ConfigEntry]], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            resources = _named_resources(kind, names, for_all) or await _all_of(admin, _KINDS[kind])
            await _require_brokers(admin, resources)
            return await answered_by_brokers(admin.describe_config_resources(resources, keys=keys or None))

    described, status = run(ask())
    configs = {
        resource: [each for each in entries.values() if everything or each.source in _SET_HERE[resource.type]]
        for resource, entries in described.items()
    }
    if json_wanted:
        print_json([_as_dict(resource, entries) for resource, entries in configs.items()])
        return status
    rows = [
        (resource.name or "(all)", each.name, _shown(each), _SOURCES.get(each.source, "unknown"))
        for resource, entries in configs.items()
        for each in entries
    ]
    print_table((_KINDS[kind].upper(), "CONFIG", "VALUE", "FROM"), rows)
    if not rows and not everything:
        click.echo("nothing is set at run time; --all prints every value", err=True)
    return status


@command.command("alter")
@_KIND
@click.argument("names", nargs=-1)
@_FOR_ALL_BROKERS
@key_value_option("-s", "--set", "sets", about="Set a config.")
@click.option("-d", "--delete", "deletes", multiple=True, metavar="KEY", help="Put a config back to what is below it.")
@key_value_option("--append", "appends", about="Add to the list that a config is.")
@key_value_option("--subtract", "subtracts", about="Take from the list.")
@click.option("--dry-run", is_flag=True, help="Only ask whether it would be allowed.")
@as_json
@connecting
def alter(
    kind: str,
    names: tuple[str, ...],
    bootstrap: str,
    properties: dict[str, str],
    for_all: bool,
    sets: dict[str, str],
    deletes: tuple[str, ...],
    appends: dict[str, str],
    subtracts: dict[str, str],
    dry_run: bool,
    json_wanted: bool,
) -> int:
    """Change configs of NAMES while the cluster runs. The documentation lists the configs that take effect at once.

    A config that Kafka does not know gets a warning with a suggestion. The cluster decides whether to accept it.

    \b
    Example:
      tidelog configs alter topics flights --set retention.ms=3600000 --delete segment.bytes
      tidelog configs alter topics flights --append cleanup.policy=compact
      tidelog configs alter brokers 1 --set max.connections=1000
      tidelog configs alter broker-loggers 1 --set tidelog.controller=DEBUG
    """
    resources = _named_resources(kind, names, for_all)
    if not resources:
        raise click.UsageError(
            "give the name of the resource to change" + (", or --default" if kind == "brokers" else "")
        )
    changes = [
        *(ConfigChange(key, value) for key, value in sets.items()),
        *(ConfigChange(key, None, DELETE) for key in deletes),
        *(ConfigChange(key, value, APPEND) for key, value in appends.items()),
        *(ConfigChange(key, value, SUBTRACT) for key, value in subtracts.items()),
    ]
    if not changes:
        raise click.UsageError("nothing to change: give --set, --delete, --append or --subtract")

    warn_of_unknown(kind, [change.name for change in changes])

    async def ask() -> tuple[dict[ConfigResource, str], int]:
        async with Admin(**client_options(bootstrap, properties)) as admin:
            await _require_brokers(admin, resources)

            async def change(resource: ConfigResource) -> str:
                await admin.alter_config_resources({resource: changes}, validate_only=dry_run)
                if not json_wanted:
                    echo(f"{'Would change' if dry_run else 'Changed'} the configuration of {resource}.")
                return "would change" if dry_run else "changed"

            if not kind.startswith("broker"):
                return await change_each(dict.fromkeys(resources), change)
            # Each broker takes its own, so that one that hangs holds up no other.
            changed = await asyncio.gather(*(change_each([each], change) for each in dict.fromkeys(resources)))
            outcomes = {each: outcome for one, _ in changed for each, outcome in one.items()}
            return outcomes, max(status for _, status in changed)

    outcomes, status = run(ask())
    if json_wanted:
        print_json([{"type": each.type, "name": each.name, "outcome": outcome} for each, outcome in outcomes.items()])
    return status


def warn_of_unknown(kind: str, names: Iterable[str]) -> None:
    """Print a line on standard error for each name that is no config of this kind in Kafka 4.3, with a suggestion."""
    known = _known_configs(kind)
    for name in names:
        if not known or name in known or name.startswith(FREE_PREFIXES):
            continue
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        click.echo(f"tidelog: warning: Kafka knows no config {name!r} of {kind}{hint}", err=True)


def _known_configs(kind: str) -> set[str]:
    """The known config names; empty for broker-loggers, whose names differ between versions."""
    from tidelog.broker.config.definitions import BROKER, CLIENT_METRICS, DYNAMIC_ONLY, GROUP, TOPIC

    tables: dict[str, set[str]] = {
        "topics": set(TOPIC),
        "brokers": {*BROKER, *DYNAMIC_ONLY},
        "groups": set(GROUP),
        "client-metrics": set(CLIENT_METRICS),
    }
    return tables.get(kind, set())


def _named_resources(kind: str, names: tuple[str, ...], for_all: bool) -> list[ConfigResource]:
    if for_all and (kind != "brokers" or names):
        raise click.UsageError("--default is only for all brokers: `brokers --default`, without names")
    if for_all:
        return [ConfigResource("broker", "")]
    if kind.startswith("broker") and not all(name.isdecimal() for name in names):
        raise click.UsageError("a broker's name is its id, a number")
    return [ConfigResource(_KINDS[kind], name) for name in names]


async def _require_brokers(admin: Admin, resources: Iterable[ConfigResource]) -> None:
    """Raise BROKER_NOT_AVAILABLE for a broker that is not there. Each is asked for its own configs, so that a request
    would wait until its time is up. The client refuses names that are no ids.
    """
    names = {each.name for each in resources if each.type in ("broker", "broker-logger")}
    broker_ids = {int(name) for name in names if name.isdecimal() and int(name) <= INT32_MAX}
    if not broker_ids:
        return
    require_running((await admin.describe_cluster(include_fenced=True)).nodes, broker_ids)


async def _all_of(admin: Admin, kind: str) -> list[ConfigResource]:
    """All resources of a kind. The requests are those that older clusters also support, if such exist."""
    if kind == "topic":
        return [ConfigResource(kind, name) for name in await admin.list_topics(include_internal=True)]
    if kind in ("broker", "broker-logger"):
        nodes = (await admin.describe_cluster()).nodes
        return [ConfigResource(kind, str(node.node_id)) for node in nodes]
    return await admin.list_config_resources([kind])


def _shown(entry: ConfigEntry) -> str:
    if entry.sensitive:
        return "(hidden)"
    return "(none)" if entry.value is None else entry.value


def _as_dict(resource: ConfigResource, entries: list[ConfigEntry]) -> dict[str, Any]:
    return {
        "type": resource.type,
        "name": resource.name,
        "configs": [
            {
                "name": each.name,
                "value": each.value,
                "source": _SOURCES.get(each.source, "unknown"),
                "read_only": each.read_only,
                "sensitive": each.sensitive,
                "synonyms": [
                    {"name": name, "value": value, "source": _SOURCES.get(source, "unknown")}
                    for name, value, source in each.synonyms
                ],
            }
            for each in entries
        ],
    }
