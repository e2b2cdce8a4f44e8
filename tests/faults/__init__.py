"""Inject every fault at every possible moment and check that nothing is lost."""
