"""A consumer group member's requests to the group coordinator, and their responses."""
