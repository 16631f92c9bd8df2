"""KRaft's variant of Raft as a pure core: messages and the time go in, effects come out."""
