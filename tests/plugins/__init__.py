"""The plugins of other programs, as far as they can be tried without those."""
