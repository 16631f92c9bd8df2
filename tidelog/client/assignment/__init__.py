"""Who gets what: partitions for the members of a group, a partition for a record. Pure."""
