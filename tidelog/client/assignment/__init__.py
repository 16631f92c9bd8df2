"""Assignment of partitions to the members of a group, and of records to partitions. Pure."""
