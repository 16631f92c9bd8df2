"""The files of a voter: the metadata log, the vote, and when they are synced and shortened."""
