"""`tidelog log`: reads a data directory of Tidelog or Kafka; `dump` also reads that of a running node.

Only `verify --repair-from` (`verify.py`) changes files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from tidelog.cli.common import HELP, CommandGroup, emit
from tidelog.cli.logs.dump import Row, dump, is_known
from tidelog.cli.logs.verify import command as verify_command
from tidelog.storage.files.disk import Disk, OsDisk


@click.group("log", cls=CommandGroup, context_settings=HELP)
def command() -> None:
    """Look into the files of a data directory, and for damage in them.

    \b
    Examples:
      tidelog log dump tidelog-data/flights-0
      tidelog log verify tidelog-data
    """


command.add_command(verify_command)


@command.command("dump")
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option("-r", "--records", is_flag=True, help="Every record of every batch, decompressed.")
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object a line.")
def dump_command(paths: tuple[str, ...], records: bool, json_wanted: bool) -> int:
    """Print what PATHS hold: files, or directories with all their files.

    Knows segments (.log), indexes (.index, .timeindex, .txnindex), snapshots (.snapshot, .checkpoint), checkpoints,
    meta.properties and partition.metadata; records of __consumer_offsets and __cluster_metadata are decoded. Exits
    with 1 when something in them does not fit.

    \b
    Examples:
      tidelog log dump tidelog-data/flights-0
      tidelog log dump --records --json tidelog-data/flights-0/00000000000000000000.log
    """
    disk = OsDisk()
    good, empty = True, True
    for path in _files(disk, tuple(path.rstrip("/") or path for path in paths)):
        empty = False
        if not json_wanted:
            emit(path)
        try:
            for row in dump(disk, path, records=records):
                good = good and "error" not in row and row.get("crc_valid", True)
                emit(json.dumps({"file": path, **row}, ensure_ascii=False) if json_wanted else _line(row))
        except ValueError as error:
            raise click.ClickException(str(error)) from None
    if empty:
        raise click.ClickException(f"{' '.join(paths)}: it contains no file of a log directory")
    return 0 if good else 1


def _files(disk: Disk, paths: tuple[str, ...]) -> Iterator[str]:
    """The given files, and the supported files of given directories and of the directories in them."""
    for path in paths:
        try:
            entries = sorted(disk.list_directory(path))
        except NotADirectoryError:
            yield path
            continue
        inside = [f"{path}/{entry.name}" for entry in entries]
        yield from (name for name, entry in zip(inside, entries) if not entry.is_directory and is_known(name))
        yield from _files(disk, tuple(name for name, entry in zip(inside, entries) if entry.is_directory))


def _line(row: Row) -> str:
    indent = "  " if "batch" in row or "error" in row else "    "
    return (indent + "  ".join(f"{name}: {_shown(value)}" for name, value in row.items())).rstrip()


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "null" if value is None else str(value)
