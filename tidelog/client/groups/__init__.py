"""What a member of a consumer group says to the coordinator, and hears from it."""
