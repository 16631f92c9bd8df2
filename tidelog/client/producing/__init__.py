"""The producer: records gathered into batches, batches sent, and what their answers mean."""
