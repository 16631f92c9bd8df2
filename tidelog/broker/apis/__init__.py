"""The handlers of Kafka's APIs.

`dispatch.py` passes a frame to its handler. `api_tables.py` holds the tables of handlers. `services.py` lists the parts
of the node that a handler may use. The packages below have one file for each API with decisions of its own.
A handler reads the request, calls the part that owns the state, and answers. It keeps no state.
"""
