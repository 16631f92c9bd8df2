"""docs/coming-from.md names each public method of the other clients, and methods that exist here."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiokafka
import aiokafka.admin
import confluent_kafka
import confluent_kafka.admin
import pytest
from aiokafka.structs import RecordMetadata

import tidelog

with warnings.catch_warnings():
    # It reads its schemas by importlib.resources.read_text.
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.consumer.fetcher
    import kafka.producer.future

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
OURS = {"producer": tidelog.Producer, "consumer": tidelog.Consumer, "admin": tidelog.Admin}
THEIRS = [
    ("aiokafka", aiokafka.AIOKafkaProducer),
    ("aiokafka", aiokafka.AIOKafkaConsumer),
    ("aiokafka", aiokafka.admin.AIOKafkaAdminClient),
    ("kafka-python", kafka.KafkaProducer),
    ("kafka-python", kafka.KafkaConsumer),
    ("kafka-python", kafka.KafkaAdminClient),
    ("confluent-kafka", confluent_kafka.Producer),
    ("confluent-kafka", confluent_kafka.Consumer),
    ("confluent-kafka", confluent_kafka.admin.AdminClient),
]


def _rows(section: str, table: str) -> Iterator[tuple[str, str]]:
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    (rows,) = re.findall(
        rf"^\| `{table}` \| here \| difference \|\n\|[-|]+\|\n(.*?)(?=\n\n|\Z)", text, re.M | re.DOTALL
    )
    for row in rows.strip().split("\n"):
        theirs, ours, _ = (cell.strip() for cell in row.strip("|").split("|"))
        yield theirs.strip("`"), ours


@pytest.mark.parametrize(("section", "theirs"), THEIRS, ids=[f"{name} {kind.__name__}" for name, kind in THEIRS])
def test_each_method_of_the_other_client_has_a_row(section: str, theirs: Any):
    public = {name for name in dir(theirs) if not name.startswith("_") and not name.isupper() and "_PRE_" not in name}
    written = [name for name, _ in _rows(section, theirs.__name__)]
    assert sorted(written) == sorted(public)


@pytest.mark.parametrize(("section", "theirs"), THEIRS, ids=[f"{name} {kind.__name__}" for name, kind in THEIRS])
def test_what_the_page_says_to_call_exists(section: str, theirs: Any):
    for _, ours in _rows(section, theirs.__name__):
        if ours != "-":
            variable, method = ours.strip("`").split(".")
            assert inspect.isfunction(getattr(OURS[variable], method)), ours


def test_each_field_of_a_record_has_a_row_and_what_the_page_names_exists():
    (text,) = re.findall(r"^## Records\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE)
    theirs = {
        *(each.name for each in dataclasses.fields(aiokafka.ConsumerRecord)),
        *RecordMetadata._fields,
        *kafka.consumer.fetcher.ConsumerRecord._fields,
        *kafka.producer.future.RecordMetadata._fields,
        *(name for name in dir(confluent_kafka.Message) if not name.startswith("_")),
    }
    assert sorted(name for name, _ in rows) == sorted(theirs)
    ours = {"record": tidelog.ConsumerRecord, "sent": tidelog.RecordMetadata}
    for _, here in rows:
        for variable, field in re.findall(r"`(\w+)\.(\w+)`", here):
            assert field in ours[variable].__annotations__
