"""The sharded training engine, its checkpoints, and the weights it publishes.

Names are listed in ``__init__.pyi`` and imported on first use, so importing `StepInfo` does not
import transformers. `WorkerGroup` needs the ``ray`` extra: import it from
`holdfast.engine.worker_group`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
