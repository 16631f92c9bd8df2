"""A broker as a member of its cluster.

Registration, heartbeats, requests forwarded to the active controller, the cluster as clients see it.
The controller itself is in `replication/controller/`; partitions are in `broker/replicas/`.
"""
