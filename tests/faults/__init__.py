"""Break everything that can break, at every moment it can, and see that nothing was lost."""
