"""Every causal-LM architecture of transformers, tiny, through all that Holdfast does with a
model.
"""
