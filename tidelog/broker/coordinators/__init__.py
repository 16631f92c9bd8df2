"""Coordinators (state machines with their state in an internal topic) and the runtime that drives
them.
"""
