"""`tidelog log`: the files of a stopped node, printed, checked and repaired.

The checks themselves are `storage/`'s; here are directories, options and output.
"""
