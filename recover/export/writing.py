"""Write a folder for ``from_pretrained`` that equals its source, or none at all."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from ...engine.api import EXPORT_DTYPES, HFExportOptions
from ...engine.hf.save_lazily import write_lazily
from ...engine.hf.sidecars import adopt_base
from ...utils.atomic_folder import staged_folder
from ...utils.config import require_choice
from ...utils.errors import CheckpointMismatchError
from ...utils.files import require_free_space
from ...utils.manifest import verify_folder
from ...utils.remote import require_local
from .adapters import StoredAdapters
from .architecture import Architecture
from .digests import Digests, Seen, require_all_written, require_equal
from .engine_folder import read_weights
from .stored_tensors import Tensors
from .weights import ModelWeights, read_model_folder, without_tied_copies


def export_weights(
    generation: Path,
    engine: Path,
    target: Path,
    architecture: Architecture,
    dtype: str,
    adapters: StoredAdapters | None,
    base: Path | None,
) -> float:
    """Write the weights of ``engine``, a folder of ``generation``, which is verified byte by byte.

    ``adapters`` are those of the engine, if it has any: they are merged into the model in ``base``,
    or in the folder that they name. Returns the duration in seconds.
    """
    began = time.monotonic()
    require_choice("dtype", dtype, (None, *EXPORT_DTYPES))
    final = require_local(target, "converting", "convert to one, and copy that", "target")
    verify_folder(generation)

    # Nothing is read yet but names and shapes, except of adapters.
    with ExitStack() as files:
        if adapters is None:
            weights = read_weights(engine, None, architecture)
        else:
            merged_into = Architecture.read(adapters.base_folder(base))
            weights = adapters.merged(merged_into, files)
        n_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        require_free_space(final.parent, n_bytes, "make room, or convert to another disk")
        write_model(weights, architecture, final, EXPORT_DTYPES[dtype])
    return time.monotonic() - began


def _ignore(_: object) -> None:
    pass


def write_model(
    weights: ModelWeights,
    architecture: Architecture,
    final: Path,
    dtype: torch.dtype | None,
    advance: Callable[[int], None] = _ignore,
    say: Callable[[str], None] = _ignore,
) -> None:
    """Write ``weights`` with config, tokenizer and other small files of the model.

    The folder ``final`` appears only after it was read back and compared. ``dtype`` is that of
    floating-point tensors, or None to leave the dtypes unchanged. ``advance`` is called with the
    bytes of each block, once as it is written and once as it is compared, and ``say`` with the name
    of the second phase.
    """
    # Everything happens in a hidden folder, which gets its name when the block has ended well.
    written = Digests(advance)
    with no_empty_folders_left(final.parent), staged_folder(final) as staging:
        _write_files(weights, architecture, staging, dtype, written.seen)
        say("comparing")
        _compare(f"{final}", weights, architecture, staging, written, Digests(advance))


def _write_files(
    weights: ModelWeights,
    architecture: Architecture,
    staging: Path,
    dtype: torch.dtype | None,
    seen: Seen,
) -> None:
    # The small files come from the folder of the config.
    model = architecture.model
    base = architecture.folder
    adopt_base(model, base)
    options = HFExportOptions(dtype=dtype, base_model_path=base)

    def of_model(name: str, first: int, values: torch.Tensor) -> None:
        seen(f"model.{name}", first, values)

    try:
        write_lazily(model, weights.tensors, staging, options, of_model)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(
            f"the source is not of the model of {base}/config.json: {error}"
        ) from error


def _compare(
    what: str,
    source: ModelWeights,
    architecture: Architecture,
    staging: Path,
    written: Digests,
    digests: Digests,
) -> None:
    """Read the folder as any reader would, and compare it with the source."""
    require_all_written(what, _by_part(source), written.values())
    with ExitStack() as files:
        # Anew, because the writer has set the dtypes of the model.
        fresh = Architecture.read(architecture.folder)
        stored = read_model_folder(staging, fresh, files)
        digests.add_all(_by_part(without_tied_copies(stored, fresh.aliases)))
    require_equal(what, written.values(), digests.values(), source.aliases)


def _by_part(weights: ModelWeights) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in weights.tensors.items()}


@contextmanager
def no_empty_folders_left(folder: Path) -> Iterator[None]:
    """If the block fails, remove ``folder`` and those of its parents that the block created and
    left empty.
    """
    # The innermost first, because only an empty folder can be removed.
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):
                each.rmdir()
        raise
