"""The metadata log and who may write it: today one voter, this node; Kafka's files, epochs and control records."""
