"""A node's metrics and health over HTTP.

`definitions.py` is the table of the metrics. The functions `collect_*` read the public attributes of the node's parts
and add the values, so that metrics add no cost to requests. Each part counts its own events; the counters of requests
and topics are in `broker/network/counters.py`. Only `broker/node.py` uses this room.
"""
