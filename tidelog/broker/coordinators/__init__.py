"""Coordinators: append records, await their commit, change state only by replay."""
