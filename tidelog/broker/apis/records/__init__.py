"""APIs that read and write partitions: Produce, Fetch, ListOffsets and their kin.

Logs and replicas themselves are in `broker/replicas/`, `replication/` and `storage/`.
"""
