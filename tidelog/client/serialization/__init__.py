"""Serializers and deserializers: JSON, and Avro with a schema registry. They know nothing of the clients."""
