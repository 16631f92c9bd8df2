"""A node's configuration.

Every key with its type and default (`definitions*.py`), the node's own view of them (`node_config.py`), what is
changed at run time (`dynamic_config.py`), and what may be changed (`validation.py`).
What a value means is the business of the part that uses it.
"""
