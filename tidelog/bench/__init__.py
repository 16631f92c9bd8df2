"""Scenarios and comparisons that drive real processes from outside."""
