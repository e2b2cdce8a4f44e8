"""`sitecustomize.py` for the processes that tests start."""
