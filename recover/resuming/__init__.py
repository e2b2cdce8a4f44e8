"""A resume: which generation wins, how it is checked, and in which order it is restored."""
