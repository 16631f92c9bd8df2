"""The metadata quorum: the replicated metadata log, with Kafka's files, epochs and control records."""
