"""The controller: it turns commands into metadata records, and records into the image."""
