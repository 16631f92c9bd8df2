"""The quorum over the metadata log."""
