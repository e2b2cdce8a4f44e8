"""A resume: which generation, what each rank reads of it, and in which order it is put back."""
