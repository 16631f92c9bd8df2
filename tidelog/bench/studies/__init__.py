"""The scenarios of `tidelog bench report`: one file each, its parameters at the top.

A study starts its own clusters, measures, and fills in a `results.StudyResult`. It draws and prints
nothing; `bench/page` does.
"""
