"""Ray actors: one process per rank, called as a group; deaths and hangs are found. All that imports ray in engine."""
