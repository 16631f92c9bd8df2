"""The cost of acks and replicas: `tidelog bench acks`, a study of synchronous producers on real clusters."""
