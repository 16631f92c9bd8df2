"""Sockets, connections and frames.

Connections assemble frames from bytes, send answers in the order of their requests, and bound everything that a client
can make a node hold. `broker/apis/` handles the contents of frames.
"""
