"""Jobs on a real SLURM of two nodes, which `make test-slurm` starts on this machine."""
