"""The files of a voter: the metadata log and the vote file, with their syncs and their cleaning."""
