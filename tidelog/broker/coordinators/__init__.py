"""Coordinators: state machines whose state lives in an internal topic, and the one runtime that drives them."""
