"""One partition's log, made of segments: opening, appending, flushing, shortening, cleaning, checking, repairing.

And `directory.py`, all logs of one log directory.
"""
