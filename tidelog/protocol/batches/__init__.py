"""Record batches: build, read, check, compress. Pure."""
