"""All random generators of a process as plain tensors: capture, bit-exact restore, and derivation
for a new rank.

Covers the global generators of Python (``random``), NumPy (the legacy ``np.random``), torch on the
CPU and torch on each CUDA device. A state is a flat dict of CPU tensors, so that checkpoints store
it as tensors and readers unpickle nothing. It has about 15 kB and takes well under a millisecond.
Generator *objects* of user code (``np.random.default_rng()``, ``torch.Generator()``) are not
global, so their owner must save them.
"""

import random
import struct
from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

from .errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from .logging import get_logger

logger = get_logger(__name__)

RngState = dict[str, Tensor]
"""Result of `capture_rng`, all on the CPU:

- ``python`` int64 ``[625]``: the 624 words of the Mersenne Twister and the position in them.
- ``python_gauss`` float64 ``[2]``: 1.0 and the second half of a Box-Muller pair if one is cached,
  else zeros.
- ``numpy``, ``numpy_gauss``: the same for NumPy.
- ``torch`` uint8 ``[5056]``: ``torch.get_rng_state()``.
- ``cuda`` uint8 ``[devices, 16]``: one row per device, starting with the current device and
  wrapping around. Absent if the process has not used CUDA.
"""

_MT_WORDS = 625
_PYTHON_STATE_VERSION = 3
_CUDA_STATE_BYTES = 16


def seed_rng(seed: int, rank: int = 0) -> None:
    """Seed every generator of this process from ``seed`` and ``rank``, so that each rank draws
    different numbers.
    """
    mixed = xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, rank))
    random.seed(mixed)

    # NumPy takes 32 bits.
    np.random.seed(mixed % 2**32)
    torch.manual_seed(_torch_seed(mixed))


def capture_rng() -> RngState:
    """Copy the state of every generator of this process.

    Reading does not advance a generator, and does not start CUDA in a process that has not used it.

    Raises:
        ConfigError: NumPy's global generator was replaced by one that is not MT19937.
    """
    state = _python_tensors(random.getstate())
    state |= _numpy_tensors(np.random.get_state(legacy=False))
    state["torch"] = torch.get_rng_state()

    # A question about a device would start CUDA.
    if torch.cuda.is_initialized():
        rows = [torch.cuda.get_rng_state(device) for device in _cuda_devices()]
        state["cuda"] = torch.stack(rows)
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Restore every generator to ``state``, so that draws continue as after its `capture_rng`.

    CUDA devices are matched starting from the current one, so that a rank that trained on
    ``cuda:3`` and now sees one device finds its stream there. Rows without a device are dropped
    with a warning. Devices without a row keep their state. Raises as `check_rng` does, before any
    generator has changed.
    """
    check_rng(state)

    # Python.
    words = tuple(state["python"].tolist())
    gauss = _unpack_gauss(state["python_gauss"])
    random.setstate((_PYTHON_STATE_VERSION, words, gauss))

    # NumPy, which also wants to know whether there is a cached number.
    *key, position = state["numpy"].tolist()
    words32 = np.array(key, dtype=np.uint32)
    gauss = _unpack_gauss(state["numpy_gauss"])
    has_gauss = int(gauss is not None)
    np.random.set_state(("MT19937", words32, position, has_gauss, gauss or 0.0))

    # torch reads a state from the start of its storage even if it is a view, so states are cloned.
    torch.set_rng_state(state["torch"].clone())
    if "cuda" not in state:
        return

    # The devices of this process, as far as there are rows.
    rows = state["cuda"]
    devices = _cuda_devices() if torch.cuda.is_available() else []
    if len(devices) < len(rows):
        logger.warning("RNG: %d CUDA states saved, %d devices here", len(rows), len(devices))
    for device, row in zip(devices, rows, strict=False):
        torch.cuda.set_rng_state(row.clone(), device)


def check_rng(state: Mapping[str, Tensor]) -> None:
    """Check that `restore_rng` can use ``state``.

    Raises:
        CheckpointMismatchError: a tensor is missing or has another shape or dtype.
        CheckpointCorruptError: its values are not a state of a generator.
    """
    # Shapes and dtypes come first.
    twister = (torch.int64, (_MT_WORDS,))
    gauss = (torch.float64, (2,))
    expected = {
        "python": twister,
        "python_gauss": gauss,
        "numpy": twister,
        "numpy_gauss": gauss,
        "torch": (torch.uint8, tuple(torch.get_rng_state().shape)),
    }
    if "cuda" in state:
        n_devices = len(state["cuda"])
        expected["cuda"] = (torch.uint8, (n_devices, _CUDA_STATE_BYTES))
    for name, (dtype, shape) in expected.items():
        if name not in state:
            raise CheckpointMismatchError(f"RNG state has no {name!r}; it has {sorted(state)}")
        tensor = state[name]
        found = (tensor.dtype, tuple(tensor.shape))
        if found != (dtype, shape):
            raise CheckpointMismatchError(
                f"RNG state {name!r} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} "
                f"{list(shape)}"
            )

    # Then the values: words of 32 bits and a position, and a state that torch takes.
    for name in ("python", "numpy"):
        *words, position = state[name].tolist()
        has_words = min(words) >= 0 and max(words) < 2**32
        has_position = 0 <= position < _MT_WORDS
        if not has_words or not has_position:
            raise CheckpointCorruptError(
                f"RNG state {name!r} is not one of a Mersenne Twister (position {position})"
            )
    generator = torch.Generator()
    try:
        generator.set_state(state["torch"].clone())
    except RuntimeError as error:
        raise CheckpointCorruptError(f"RNG state 'torch' is not one of torch: {error}") from error


def derive_rng(state: Mapping[str, Tensor], rank: int) -> RngState:
    """Derive a state for ``rank``, which the checkpoint lacks because the world has grown.

    Every generator is seeded with the 64-bit ``xxh3_64`` of the tensors of ``state``, which is the
    one of rank 0, in the order of their names, followed by ``rank`` as a little-endian int64. The
    result is the same at every restart, and differs between ranks and steps. CUDA device i (in the
    order of `RngState`) gets that seed + i.
    """
    digest = _digest(state)
    digest.update(struct.pack("<q", rank))
    seed = digest.intdigest()

    # New generators, so that those of this process stay as they are.
    derived = _python_tensors(random.Random(seed).getstate())
    twister = np.random.MT19937(np.random.SeedSequence(seed))
    numpy_rng = np.random.RandomState(twister)
    derived |= _numpy_tensors(numpy_rng.get_state(legacy=False))
    derived["torch"] = _seeded_state(torch.Generator(), seed)
    if torch.cuda.is_initialized():
        states = []
        for index, device in enumerate(_cuda_devices()):
            generator = torch.Generator(device)
            states.append(_seeded_state(generator, seed + index))
        derived["cuda"] = torch.stack(states)
    return derived


def _seeded_state(generator: torch.Generator, seed: int) -> Tensor:
    generator.manual_seed(_torch_seed(seed))
    return generator.get_state()


def rng_digest(state: Mapping[str, Tensor]) -> str:
    """Return ``"xxh3_64:<hex>"`` of a state. Equal digests mean equal later draws."""
    return f"xxh3_64:{_digest(state).hexdigest()}"


def _digest(state: Mapping[str, Tensor]) -> xxhash.xxh3_64:
    digest = xxhash.xxh3_64()
    for name in sorted(state):
        data = state[name].contiguous().numpy()
        digest.update(data.tobytes())
    return digest


def _cuda_devices() -> list[torch.device]:
    """List this process's devices, the current one first."""
    count = torch.cuda.device_count()
    current = torch.cuda.current_device()
    return [torch.device("cuda", (current + index) % count) for index in range(count)]


def _torch_seed(seed: int) -> int:
    """The lower 63 bits, because torch takes signed integers."""
    return seed & (2**63 - 1)


def _pack_gauss(gauss: float | None) -> Tensor:
    packed = [0.0, 0.0]
    if gauss is not None:
        packed = [1.0, gauss]
    return torch.tensor(packed, dtype=torch.float64)


def _unpack_gauss(packed: Tensor) -> float | None:
    cached, value = packed.tolist()
    return value if cached else None


def _python_tensors(state: tuple) -> RngState:
    _, words, gauss = state
    return {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": _pack_gauss(gauss),
    }


def _numpy_tensors(state: Mapping) -> RngState:
    if state["bit_generator"] != "MT19937":
        raise ConfigError(
            f"numpy's global generator is {state['bit_generator']}; only MT19937 (numpy's "
            "default) can be captured. Keep the other one as a np.random.Generator of your own "
            "and register it with the handler."
        )
    twister = state["state"]
    key = twister["key"].astype(np.int64)
    words = np.append(key, twister["pos"])
    gauss = None
    if state["has_gauss"]:
        gauss = state["gauss"]
    return {
        "numpy": torch.from_numpy(words),
        "numpy_gauss": _pack_gauss(gauss),
    }
