"""`tidelog log`: prints, verifies and repairs the files of a stopped node.

`storage/` has the checks; this package handles directories, options and output.
"""
