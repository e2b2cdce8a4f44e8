"""A snapshot from the call of `RecoverHandler.dump` to the committed generation, and the exports
made with it.
"""
