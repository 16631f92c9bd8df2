"""Connections to brokers, the cluster's metadata, and who answers which request."""
