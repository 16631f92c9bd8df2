"""What the controller decides, as pure functions: a command and an image in, records and an answer out."""
