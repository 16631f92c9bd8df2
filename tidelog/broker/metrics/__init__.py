"""A node's metrics and health over HTTP.

No other room calls this one. A scrape reads the public attributes of the node's parts, so that
metrics add no cost to requests. The counters of requests are in `broker/network/counters.py`.
"""
