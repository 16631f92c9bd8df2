"""What acks and replicas cost: `tidelog bench acks`, a study of synchronous producers on real clusters."""
