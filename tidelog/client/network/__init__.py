"""Connections to brokers, the cluster's metadata, and the choice of the broker for a request."""
