"""The server process: network, dispatch, one file per API, coordinators, command line."""
