"""Conversion of bytes to values and back: messages, record batches, compression. Pure."""
