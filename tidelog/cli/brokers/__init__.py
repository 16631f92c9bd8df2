"""`tidelog brokers`, `log-dirs` and `features`: a cluster's nodes, their log directories and feature levels.

These commands change no records. Groups, topics and moves of replicas have other commands.
"""
