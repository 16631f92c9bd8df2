"""Bytes to values and back: messages, record batches, compression. Pure; imports nothing above it."""
