"""`capture_rng` and `restore_rng` restore every generator bit for bit. `derive_rng` seeds ranks
that are new.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from holdfast.utils.rng import capture_rng, derive_rng, restore_rng, rng_digest, seed_rng
from tests.limits import stretched

# Draw from every generator and print exact values. An odd number of normals leaves a cached half of
# a pair.
DRAW = """
import random, numpy as np, torch
def draw():
    parts = [random.random().hex(), random.gauss(0, 1).hex(), str(random.getrandbits(70))]
    parts += [float(np.random.normal()).hex(), float(np.random.rand()).hex()]
    parts += [str(np.random.permutation(7))]
    parts += [torch.randn(3).numpy().tobytes().hex(), torch.randperm(9).numpy().tobytes().hex()]
    return "|".join(parts)
"""
namespace: dict = {}
exec(DRAW, namespace)
draw = namespace["draw"]


@pytest.fixture(autouse=True)
def _leave_generators_as_found() -> Iterator[None]:
    before = capture_rng()
    yield
    restore_rng(before)


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("draws_before", range(4))
def test_restore_repeats_the_draws_when_a_gaussian_half_is_cached_or_not(draws_before: int) -> None:
    seed_all(5)
    for _ in range(draws_before):  # each leaves, or uses up, the cached half of a pair
        random.gauss(0, 1)
        np.random.normal()
    state = capture_rng()
    assert state["python_gauss"][0] == state["numpy_gauss"][0] == draws_before % 2
    expected = [draw() for _ in range(3)]
    seed_all(99)
    draw()
    restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_capture_changes_no_generator_and_later_draws_do_not_change_it() -> None:
    seed_all(1)
    expected = [draw(), draw()]
    seed_all(1)
    state = capture_rng()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    assert [draw(), draw()] == expected
    assert all(torch.equal(state[name], copies[name]) for name in copies)


def test_capture_at_every_position_of_the_twister_restores_it() -> None:
    seed_all(2)
    for _ in range(5):
        np.random.rand(130)
        torch.rand(133)
        for _ in range(251):
            random.random()
        state, expected = capture_rng(), draw()
        restore_rng(state)
        assert draw() == expected


def test_state_is_plain_cpu_tensors_that_load_weights_only_in_another_process(
    tmp_path: Path,
) -> None:
    seed_all(3)
    draw()
    state = capture_rng()
    assert all(isinstance(value, torch.Tensor) and value.numel() for value in state.values())
    assert {value.dtype for value in state.values()} == {torch.int64, torch.float64, torch.uint8}
    torch.save(state, tmp_path / "rng.pt")
    expected = draw() + draw()
    script = (
        f"{DRAW}\nfrom holdfast.utils.rng import restore_rng\n"
        f"restore_rng(torch.load({str(tmp_path / 'rng.pt')!r}, weights_only=True))\nprint(draw() "
        "+ draw(), end='')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=stretched(60),
        check=True,
    )
    assert result.stdout == expected


def test_restore_names_what_is_wrong_and_touches_nothing() -> None:
    state = capture_rng()
    seed_all(7)
    before = capture_rng()
    with pytest.raises(CheckpointMismatchError, match=r"no 'numpy'; it has .*python_gauss"):
        restore_rng({name: tensor for name, tensor in state.items() if name != "numpy"})
    with pytest.raises(
        CheckpointMismatchError,
        match=r"'torch' is torch.uint8 \[3\]; expected torch.uint8 \[5056\]",
    ):
        restore_rng(state | {"torch": torch.zeros(3, dtype=torch.uint8)})
    after = capture_rng()
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "index", "value"), [("python", 3, -5), ("numpy", 0, 2**32), ("numpy", -1, 625)]
)
def test_words_that_are_no_twister_are_refused_before_any_generator_is_touched(
    name: str, index: int, value: int
) -> None:
    state = capture_rng()
    bad = {**state, name: state[name].clone()}
    bad[name][index] = value
    with pytest.raises(
        CheckpointCorruptError, match=f"RNG state '{name}' is not one of a Mersenne Twister"
    ):
        restore_rng(bad)
    with pytest.raises(CheckpointCorruptError, match="RNG state 'torch' is not one of torch"):
        restore_rng({**state, "torch": torch.full_like(state["torch"], 255)})
    assert rng_digest(capture_rng()) == rng_digest(state)


def test_capture_refuses_a_numpy_generator_it_cannot_store() -> None:
    original = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        with pytest.raises(ConfigError, match="PCG64; only MT19937"):
            capture_rng()
    finally:
        np.random.set_bit_generator(original)  # type: ignore[attr-defined]


def test_derived_state_repeats_and_differs_between_ranks_and_states() -> None:
    seed_all(11)
    state = capture_rng()
    draws = {}
    for rank in (1, 2, 3):
        restore_rng(derive_rng(state, rank))
        draws[rank] = draw().split("|")
        restore_rng(derive_rng({name: state[name] for name in reversed(state)}, rank))
        assert draw().split("|") == draws[rank]
    seed_all(12)
    restore_rng(derive_rng(capture_rng(), 1))
    streams = [*draws.values(), draw().split("|")]
    for generator in (
        0,
        2,
        3,
        4,
        6,
        7,
    ):  # wide draws of python, numpy and torch, of which no two may coincide
        assert len({stream[generator] for stream in streams}) == 4


def test_derive_leaves_the_generators_and_its_argument_alone() -> None:
    seed_all(13)
    state = capture_rng()
    before = {name: tensor.clone() for name, tensor in state.items()}
    derive_rng(state, 4)
    after = capture_rng()
    assert all(
        torch.equal(after[name], before[name]) and torch.equal(state[name], before[name])
        for name in before
    )


def test_a_state_that_is_a_view_of_a_tensor_is_restored() -> None:
    """torch takes the memory from the start of the storage, even if the tensor begins later."""
    seed_all(8)
    other = capture_rng()
    seed_all(9)
    state = capture_rng()
    expected = draw()
    restore_rng({name: torch.stack([other[name], state[name]])[1] for name in state})
    assert draw() == expected


def test_every_cuda_device_is_given_the_memory_of_its_own_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Simulates three devices, which this machine may not have."""
    given: dict[torch.device, bytes] = {}

    def set_rng_state(row: torch.Tensor, device: torch.device) -> None:
        given[device] = bytes(row.untyped_storage())[
            : row.nbytes
        ]  # torch._C.Generator.set_state reads it like this

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", set_rng_state)
    restore_rng(capture_rng() | {"cuda": torch.arange(3, dtype=torch.uint8)[:, None].repeat(1, 16)})
    assert given == {torch.device("cuda", (1 + row) % 3): bytes([row]) * 16 for row in range(3)}


def test_cuda_states_are_dropped_with_a_warning_when_there_is_no_device(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    state = capture_rng() | {"cuda": torch.zeros(2, 16, dtype=torch.uint8)}
    expected = draw()
    with caplog.at_level("WARNING", logger="holdfast"):
        restore_rng(state)
    assert draw() == expected
    assert "2 CUDA states saved, 0 devices here" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_repeat_after_restore_and_derived_ranks_differ() -> None:
    def draw_cuda() -> torch.Tensor:
        return torch.cat(
            [torch.randn(5, device=f"cuda:{i}").cpu() for i in range(torch.cuda.device_count())]
        )

    torch.cuda.manual_seed_all(3)
    draw_cuda()
    state = capture_rng()
    expected = draw_cuda()
    restore_rng(state)
    assert torch.equal(draw_cuda(), expected)
    restore_rng(derive_rng(state, 1))
    derived = draw_cuda()
    restore_rng(derive_rng(state, 2))
    assert not torch.equal(derived, expected) and not torch.equal(derived, draw_cuda())


def test_a_seed_starts_every_generator_and_ranks_differ() -> None:
    draws = []
    for seed, rank in ((1, 0), (1, 1), (2, 0), (1, 0)):
        seed_rng(seed, rank)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[3]
    assert all(len({draw[i] for draw in draws}) == 3 for i in range(3))
