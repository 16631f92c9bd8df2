"""Kafka's APIs as a node serves them.

`dispatch.py` takes one frame to its handler; `served.py` is the table of handlers; `services.py` names the parts of the
node that a handler may use. The rooms below hold one file for each API that decides something.
A handler reads the request, asks the part that owns the state, and answers. It keeps no state.
"""
