"""The compiler of messages: a declared message becomes an encoder and a decoder for each version. Pure."""
