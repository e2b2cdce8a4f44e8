"""What trains, and what it reads and writes: the sharded engine, its checkpoints, and the weights it publishes.

The names are in ``__init__.pyi`` and imported when they are used: who needs `StepInfo` does not wait for transformers.
`WorkerGroup` needs the ``ray`` extra and is imported from `holdfast.engine.worker_group`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
