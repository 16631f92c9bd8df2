"""Replicas that agree: partitions, the metadata quorum and the controller."""
