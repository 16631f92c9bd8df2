"""Small measurements of one part at a time."""
