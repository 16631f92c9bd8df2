"""`tidelog groups`: consumer groups as an operator sees and changes them.

What a reset means is decided in `reset.py` and what is printed in `show.py`, both pure.
"""
