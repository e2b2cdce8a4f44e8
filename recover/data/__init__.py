"""The dataloader's position and the order of its epochs, saved and restored."""
