"""One partition's log, made of segments: opening, appending, flushing, shortening, cleaning, checking, repairing.

`directory.py` holds all logs of one log directory.
"""
