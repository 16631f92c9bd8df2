"""When things happen on the event loop: who waits for what, deadlines, fairness, work in pieces.

Nothing here knows what a request is about.
"""
