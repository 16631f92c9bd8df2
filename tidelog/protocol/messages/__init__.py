"""One file per API with its request and response, for every supported version.

A field is one line with its type and versions; `tag=0` makes it a tagged field. The handlers are in `broker/apis/`.
Produce and Fetch are also read and written by hand, in `protocol/hot.py` and `protocol/hot_replication.py`: a new field
of theirs must be added there.
"""
