"""One file per kind of measurement; each measures one server and knows nothing of the other."""
