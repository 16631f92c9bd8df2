"""The disk port, and the small files beside the logs."""
