"""The administrator's client, by subject."""
