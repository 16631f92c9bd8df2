"""One segment: its batches, its indexes, the checks before an append, the reads, and its damage.

Some pure rules for a whole log are here too: its settings (`log_config.py`), retention (`retention.py`) and look-ups
(`lookup.py`). `storage/log/` applies them.
"""
