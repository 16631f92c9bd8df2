"""A broker as a member of its cluster: registration, heartbeats, forwarding, views of the metadata.

It forwards requests to the active controller, and shows clients the cluster's metadata. The
controller itself is in `replication/controller/`; partitions are in `broker/replicas/`.
"""
