"""A node under attack, and another client beside: what the client notices, and what the node's memory does."""
