"""When to snapshot, where snapshots live, and how a job comes back."""
