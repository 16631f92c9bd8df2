"""The click face of `tidelog start`: help and usage errors; plain forms never come here, see `broker/main.py`."""

from __future__ import annotations

import click


def _overrides(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    overrides = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not key=value")
        overrides[key.strip()] = text.strip()
    return overrides


@click.command("start")
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option(
    "-o",
    "--override",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_overrides,
    help="One configuration value, by Kafka's name; wins over FILE. May be given many times.",
)
def command(file: str | None, overrides: dict[str, str]) -> int:
    """Run a node until SIGTERM or Ctrl-C.

    Without arguments: broker and controller in one, on 127.0.0.1:9092, data in ./tidelog-data, which is created and
    formatted when it is not there. FILE is YAML (or Java properties) with Kafka's own configuration names. The first
    line printed says the address that clients are told.

    \b
    Examples:
      tidelog start
      tidelog start node.yaml -o listeners=PLAINTEXT://127.0.0.1:19092 -o log.dirs=/var/lib/tidelog
    """
    from tidelog.broker.cli.start import start

    return start(file, overrides)
