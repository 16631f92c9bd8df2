"""Spark's source and sink, on the client and the protocol only."""

from tidelog.spark_ingest.tables import json_value, latest, schema_id, schema_payload

__all__ = ["json_value", "latest", "schema_id", "schema_payload"]
