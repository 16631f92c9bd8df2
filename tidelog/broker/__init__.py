"""The server process: network, APIs, replicas, coordinators, and the node that puts them together."""
