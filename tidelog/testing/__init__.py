"""Real brokers for tests: in this process (`embedded.py`) or as processes of their own
(`processes.py`).

Users' tests, Tidelog's tests and `bench/` use this package. It needs no test framework.
"""
