"""Decides what a cleaning keeps of a compacted log: the newest record of each key. `storage/log/` rewrites files."""
