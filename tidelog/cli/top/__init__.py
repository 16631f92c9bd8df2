"""`tidelog top`: topics, groups and brokers with their rates, again and again.

`snapshot.py` asks the cluster, `rates.py` compares two snapshots, `command.py` shows the result.
"""
