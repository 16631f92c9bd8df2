"""Record batches: built, read, checked and compressed. Pure."""
