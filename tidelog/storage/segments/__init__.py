"""One segment: its batches, its indexes, what may be appended, how it is read, and which of its bytes are damaged."""
