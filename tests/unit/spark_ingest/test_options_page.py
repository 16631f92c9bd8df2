from __future__ import annotations

import re

from tests.unit.spark_ingest import options_page
from tidelog.spark_ingest.option_table import SOURCE_OPTIONS, STREAM
from tidelog.spark_ingest.options import SourceOptions


def test_the_page_has_the_options_of_the_code():
    assert options_page.PAGE.read_text() == options_page.rendered(), (
        "run: python -m tests.unit.spark_ingest.options_page"
    )
    for option in SOURCE_OPTIONS:
        assert f"| `{option.name}`" in options_page.rendered()


def test_the_defaults_on_the_page_are_those_of_the_code():
    options = SourceOptions.parse({"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}, STREAM)
    values = {
        "failOnDataLoss": options.fail_on_data_loss,
        "includeHeaders": options.include_headers,
        "kafkaConsumer.pollTimeoutMs": options.poll_timeout_ms,
        "fetchOffset.numRetries": options.fetch_offset_retries,
        "fetchOffset.retryIntervalMs": options.fetch_offset_retry_interval_ms,
        "maxDecompressedBatchBytes": options.max_batch_bytes,
    }
    written = {
        option.name: option.default for option in SOURCE_OPTIONS if re.fullmatch(r"`(\d+|true|false)`", option.default)
    }
    assert written == {name: f"`{str(value).lower()}`" for name, value in values.items()}
    assert options.max_trigger_delay_ms == 15 * 60_000
