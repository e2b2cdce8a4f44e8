"""Convert checkpoints of other trainers, and of Holdfast, from format to format. See
`conversion.convert`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
