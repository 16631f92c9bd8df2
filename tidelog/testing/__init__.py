"""Real brokers for tests: in this process (`embedded.py`) or as processes of their own (`processes.py`).

For users' tests and for ours. `bench/` stands on this room. No test framework is needed.
"""
