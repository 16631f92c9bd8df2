"""The consumer: subscription, positions, fetches, and its side of a rebalance."""
