"""`tidelog top`: a repeated view of topics, groups and brokers with their rates.

`snapshot.py` queries the cluster, `rates.py` compares two snapshots, `command.py` shows the result.
"""
