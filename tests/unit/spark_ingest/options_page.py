"""The tables of options in `docs/spark.md`, rendered from the code; run as a module it writes them."""

from __future__ import annotations

import re
from pathlib import Path

from tidelog.spark_ingest import sink_options
from tidelog.spark_ingest.option_table import BOTH, KAFKA_SUPPORTED, SOURCE_OPTIONS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "spark.md"
_TABLES = re.compile(
    r"(<!-- Begin of the (options|consumer's options|sink's options)[^\n]*-->\n)(.*?)(<!-- End of the )", re.DOTALL
)


def options_table() -> str:
    rows = ["| option | read | default | meaning | example |", "|---|---|---|---|---|"]
    for option in SOURCE_OPTIONS:
        name = f"`{option.name}`" + ("" if option.in_spark else " *")
        read = "" if option.mode == BOTH else option.mode
        meaning = option.meaning[0].upper() + option.meaning[1:] if option.meaning[0] != "`" else option.meaning
        rows.append(f"| {name} | {read} | {option.default} | {meaning} | `{option.example}` |")
    return "\n".join(rows) + "\n"


def consumer_options() -> str:
    names = sorted(name.removeprefix("kafka.") for name in KAFKA_SUPPORTED)
    return ", ".join(f"`{name}`" for name in names) + ".\n"


def sink_options_table() -> str:
    rows = ["| option | default | meaning | example |", "|---|---|---|---|"]
    for option in sink_options.SINK_OPTIONS:
        name = f"`{option.name}`" + ("" if option.in_spark else " *")
        rows.append(f"| {name} | {option.default} | {option.meaning} | `{option.example}` |")
    names = sorted(name.removeprefix("kafka.") for name in sink_options.KAFKA_SUPPORTED)
    return "\n".join(rows) + "\n\nOf Kafka's producer: " + ", ".join(f"`{name}`" for name in names) + ".\n"


def rendered() -> str:
    tables = {
        "options": options_table(),
        "consumer's options": consumer_options(),
        "sink's options": sink_options_table(),
    }
    return _TABLES.sub(lambda match: match[1] + "\n" + tables[match[2]] + "\n" + match[4], PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(rendered())
