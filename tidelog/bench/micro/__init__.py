"""Costs of single functions in this process, by CPU time; no server is started."""
