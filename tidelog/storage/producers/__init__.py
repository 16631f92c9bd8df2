"""What a log knows of its producers: sequences, open transactions, and what of that is on disk."""
