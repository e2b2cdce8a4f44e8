"""AReaL's files."""
