"""Spark looks for top-level modules named pyspark_* and takes their DefaultSource: so it knows format("tidelog")."""

from tidelog.spark_ingest.source import TidelogDataSource as DefaultSource

__all__ = ["DefaultSource"]
