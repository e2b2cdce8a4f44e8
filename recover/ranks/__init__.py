"""One interface to all ranks of a run, under torchrun and under Ray, and the engines of each rank."""
