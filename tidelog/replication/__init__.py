"""Replication: partitions, the metadata quorum and the controller."""
