"""Sockets, connections and frames.

Bytes become whole frames, answers leave in the order of their requests, and everything a client can make a node hold
is bounded. What a frame means is the business of `broker/apis/`.
"""
