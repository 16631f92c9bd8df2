"""One file per API: its request and its response, for every version served."""
