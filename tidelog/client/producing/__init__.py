"""The producer: batches of records, their delivery, and the handling of responses."""
