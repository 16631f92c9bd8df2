"""The APIs that the transaction coordinator handles."""
