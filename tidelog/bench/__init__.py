"""Scenarios and comparisons that drive real broker processes from outside.

Nothing here is imported by the broker, and nothing here reaches into one: a server is a process with a port, a pid and
a data directory. `processes` starts ours, `peers` starts Apache Kafka, `scenarios` measure either through the same
client, `report` sets the figures side by side.
"""
