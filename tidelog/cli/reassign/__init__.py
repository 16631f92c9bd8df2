"""`tidelog reassign`: moves replicas between brokers and between log directories.

`partition_lists.py` reads Kafka's JSON files and `proposals.py` makes plans; both are pure.
"""
