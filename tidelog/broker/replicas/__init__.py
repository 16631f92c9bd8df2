"""The replicas that this broker hosts.

`partitions.py` holds them, `hosting.py` makes them follow the metadata, and the other files keep their logs: flushed,
cleaned, scrubbed, repaired, moved. How replicas agree is in `replication/`, how a log is kept in `storage/`.
"""
