"""Spark's source and sink, on the client and the protocol only."""
