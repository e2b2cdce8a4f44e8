"""The folder of one engine, in torch.distributed.checkpoint's format: weights and adapters."""

from pathlib import Path

from ...engine.dcp.base_model import BASE, BASE_SAMPLE, base_fingerprint
from ...engine.dcp.root_names import (
    Root,
    choose_root,
    describe_roots,
    find_roots,
)
from ...engine.dcp.state import ROOT
from ...utils.config import require_choice
from ...utils.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
)
from ...utils.plain_values import unpack_json
from .adapters import LeftOut, StoredAdapters
from .architecture import Architecture
from .stored_tensors import DCPFolder, Tensors
from .weights import ModelWeights, strip_module, without_tied_copies


def is_engine_folder(folder: Path) -> bool:
    """Whether the folder has torch's ``.metadata``."""
    return (folder / ".metadata").is_file()


def engine_folders(generation: Path) -> list[Path]:
    """Folders of the engines of a generation, by name."""
    children = sorted(generation.iterdir())
    return [path for path in children if is_engine_folder(path)]


def engine_folder(folder: Path, engine: str | None) -> Path:
    """Folder of one engine of a generation. A folder that holds tensors itself is returned
    unchanged.

    Raises:
        ConfigError: ``engine`` is unknown, or None while the generation has several engines.
    """
    if is_engine_folder(folder):
        return folder
    # With one engine its name need not be given.
    found = {path.name: path for path in engine_folders(folder)}
    if engine is None and len(found) > 1:
        raise ConfigError(f"the source holds {sorted(found)}; say which one: engine=, --engine")
    require_choice("engine", engine, (None, *found))
    if not found:
        raise CheckpointNotFoundError(f"{folder} holds no engine")
    if engine is None:
        (engine,) = found
    return found[engine]


def read_weights(
    path: Path,
    root: str | None,
    architecture: Architecture | None,
) -> ModelWeights:
    """The model below ``root``. None takes the only root that there is."""
    folder = DCPFolder(path)
    where = find_root(folder, root, architecture)
    return weights_below(folder, where, architecture)


def find_root(
    folder: DCPFolder,
    name: str | None,
    architecture: Architecture | None,
) -> Root:
    """The root called ``name``, or the only one. Raises `ConfigError` if there are several."""
    names = folder.layout.names()
    roots = find_roots(names)
    if name is None:
        if len(roots) != 1:
            raise ConfigError(f"{folder.path}: {describe_roots(names)}")
        name = roots[0].name

    # Without the names of the parameters, the one that the folder itself shows.
    parameters: list[str] = []
    if architecture is not None:
        parameters = architecture.parameters
    else:
        for root in roots:
            if root.name == name:
                return root

    # With them, the prefix under which most of the parameters are.
    try:
        return choose_root(names, name, parameters)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{folder.path}: {error}") from error


def weights_below(
    folder: DCPFolder,
    root: Root,
    architecture: Architecture | None,
) -> ModelWeights:
    """The tensors of the model below ``root``, under the names of the model."""
    # Other contents keep their names, which do not begin like this.
    prefix = f"{ROOT}.model."
    tensors: Tensors = {}
    for name in folder.layout.tensors:
        own = root.canonical(name)
        if own.startswith(prefix):
            key = own.removeprefix(prefix)
            tensors[key] = folder.tensor(name)

    aliases: dict[str, str] = {}
    if architecture is not None:
        aliases = architecture.aliases
    return without_tied_copies(strip_module(tensors), aliases)


def stored_adapters(path: Path) -> StoredAdapters | None:
    """Adapters of a folder that holds them without their base. None if the folder holds all
    weights.
    """
    folder = DCPFolder(path)
    root = root_without_base(folder)
    if root is None:
        return None

    # Beside the parameters there is a description of those left out, and a share of their
    # fingerprint from each rank.
    prefix = root.model.removesuffix("model.")
    packed = folder.whole_tensor(f"{prefix}{BASE}")
    shares = [folder.whole_tensor(name) for name in _shares(folder, prefix)]
    description = unpack_json(packed, BASE)
    left_out = LeftOut(description, base_fingerprint(shares))

    trained = weights_below(folder, root, None)
    return StoredAdapters(path, trained.tensors, left_out)


def root_without_base(folder: DCPFolder) -> Root | None:
    """Root of the trained parameters of a partly frozen model. None if the folder holds all."""
    for name in folder.layout.tensors:
        if name.rpartition(".")[2] != BASE:
            continue
        prefix = name.removesuffix(BASE)
        if _shares(folder, prefix):
            return Root(prefix.removesuffix("."), f"{prefix}model.", None)
    return None


def _shares(folder: DCPFolder, prefix: str) -> list[str]:
    """Names below ``prefix`` of the shares of a base's fingerprint."""
    beginning = f"{prefix}{BASE_SAMPLE}."
    return [name for name in folder.layout.tensors if name.startswith(beginning)]
