"""A node seen from outside: metrics and health over HTTP.

Nothing reports to this room. A scrape reads the public attributes of the parts, so that serving costs nothing for it.
The counters that requests do count are in `broker/network/counters.py`.
"""
