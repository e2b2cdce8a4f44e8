"""Ray actors: one process per rank, called as a group, with detection of deaths and hangs."""
