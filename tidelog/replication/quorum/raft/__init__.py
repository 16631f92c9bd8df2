"""Raft as KRaft does it, pure: messages and the time go in, effects come out."""
