"""Where the figures come from."""
