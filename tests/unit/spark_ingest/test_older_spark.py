"""The sink with PySpark 4.0, which has no Arrow writer of streams, and streams that are read before PySpark 4.2."""

from __future__ import annotations

import sys

import pytest

from tidelog.protocol.errors import ConfigError

datasource = pytest.importorskip("pyspark.sql.datasource")
types = pytest.importorskip("pyspark.sql.types")


def test_batches_are_written_and_streams_are_refused(monkeypatch):
    from tidelog.spark_ingest.source import TidelogDataSource

    monkeypatch.delattr(datasource, "DataSourceStreamArrowWriter", raising=False)
    monkeypatch.delitem(sys.modules, "tidelog.spark_ingest.writers", raising=False)
    sink = TidelogDataSource({"kafka.bootstrap.servers": "localhost:1", "topic": "t"})
    schema = types.StructType().add("value", "binary")
    try:
        assert isinstance(sink.writer(schema, overwrite=False), datasource.DataSourceArrowWriter)
        with pytest.raises(ConfigError, match=r"streams need PySpark 4\.2 or newer"):
            sink.streamWriter(schema, overwrite=False)
    finally:
        sys.modules.pop("tidelog.spark_ingest.writers", None)  # the module as it is with this PySpark comes next


def test_a_stream_that_is_read_is_refused_where_spark_calls_the_reader(monkeypatch):
    """An error of `streamReader` itself ends in one of Spark's own."""
    from tidelog.spark_ingest import source

    monkeypatch.setattr(source, "SupportsTriggerAvailableNow", object)
    options = {"kafka.bootstrap.servers": "localhost:1", "subscribe": "t"}
    reader = source.TidelogDataSource(options).streamReader(types.StructType().add("value", "binary"))
    assert isinstance(reader, source.RefusedStreamReader)
    for call in (reader.initialOffset, reader.latestOffset):
        with pytest.raises(ConfigError, match=r"streams need PySpark 4\.2 or newer"):
            call()
