"""A resume: the generation that wins, its checks, and the order of the restore."""
