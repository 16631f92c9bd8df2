"""The replicas that this broker hosts.

`partitions.py` holds them with the requests that wait for them. `hosting.py` applies the metadata to them: it makes
leaders and followers. The other modules flush, clean, scrub, repair and move their logs. `replication/` contains the
replication protocol, `storage/` the log format.
"""
