"""The order of work on the event loop: waiting requests, deadlines, fairness, work in pieces.

No module here depends on the content of a request.
"""
