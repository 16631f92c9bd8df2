"""The command line: `tidelog ...`.

Each command has a file or a package; `commands.py` is the table that loads a command on its first use.
Commands reach clusters through `client/`. Only `start`, `format` and `log` use the server and its files.
No other package imports this one, but for `bench`: its commands are `tidelog bench`, and use `common.py`.
"""
