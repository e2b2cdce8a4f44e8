"""Write the weights of a generation as a Hugging Face or PEFT folder, one block at a time."""
