"""Producer, consumer and admin, asyncio first; knows the protocol and nothing of the server."""
