"""The controller: commands become metadata records, records become the image."""
