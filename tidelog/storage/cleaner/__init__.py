"""What a cleaning keeps of a compacted log: the newest record of each key. Decides; `storage/log/` rewrites files."""
