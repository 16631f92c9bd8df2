"""The command line: `tidelog ...`.

One file or room for each command; `commands.py` is the table that loads a command when its word is used.
Commands talk to clusters through `client/`. Only `start`, `format` and `log` know the server and its files.
Nothing else in the house imports this room.
"""
