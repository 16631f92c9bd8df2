"""The producer state of a log: sequences, open transactions, and their snapshots on disk."""
