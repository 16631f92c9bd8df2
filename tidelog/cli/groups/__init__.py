"""`tidelog groups`: describes and changes consumer groups.

`reset.py` computes new offsets and `show.py` the output; both are pure.
"""
