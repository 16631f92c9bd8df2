"""A node's configuration.

`definitions*.py` list every key with its type, default and update mode. `NodeConfig` (`node_config.py`) has the values
at the start of the node, `DynamicConfig` (`dynamic_config.py`) the values in force now. `validation.py` refuses changes
at run time, and `unserved.py` lists the keys without an effect. The part that uses a value decides what it means.
A key that may change at run time is read from `DynamicConfig`. A part that keeps a value subscribes to its changes.
"""
