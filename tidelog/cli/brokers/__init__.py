"""`tidelog brokers`, `log-dirs` and `features`: what the nodes of a cluster are, hold and serve.

Nothing here changes records; groups, topics and moves of replicas have commands of their own.
"""
