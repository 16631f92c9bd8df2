"""`tidelog cluster`: several nodes as processes on this machine.

`command.py` has the words, `nodes.py` the processes, `state.py` the file that remembers them, `view.py` and
`balance.py` what is shown of them. Nodes are driven from outside, by signals and by the client.
"""
