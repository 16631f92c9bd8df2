"""One file per benchmark scenario."""
