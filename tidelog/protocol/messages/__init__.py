"""One file per API with its request and response, for every supported version."""
