"""When to snapshot: schedules, signals, notices and deadlines."""
