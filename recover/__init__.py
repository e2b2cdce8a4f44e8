"""When to snapshot, where snapshots live, and how a job comes back.

The names are in ``__init__.pyi`` and imported when they are used.
`Supervisor` needs the ``ray`` extra and is imported from `holdfast.recover.supervisor`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
