"""APIs that read and write partitions: Produce, Fetch, ListOffsets and related APIs.

The logs and replicas are in `broker/replicas/`, `replication/` and `storage/`.
"""
