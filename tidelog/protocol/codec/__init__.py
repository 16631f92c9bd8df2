"""The message compiler: makes an encoder and a decoder for each version of a declared message.

Pure.
"""
