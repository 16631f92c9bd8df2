"""The controller's decisions, as pure functions from a command and an image to records and a
response.
"""
