"""Small things the engine and recovery both need, none of which knows about training."""
