"""`tidelog cluster`: runs several nodes as processes on this machine.

`command.py` has the commands, `nodes.py` the processes, `state.py` the file that stores them, `view.py` and
`balance.py` the tables. The commands control nodes only by signals and by the client.
"""
