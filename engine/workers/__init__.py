"""Ray actors: one process per rank, called as a group; deaths and hangs are found. All of engine that knows Ray."""
