"""Staging, blocks, saves and loads of Holdfast on a simulated device, with one rank: every wait is
in place.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from holdfast.engine import changing_weights
from holdfast.engine.dcp import reader
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import DCPSaver, save_dcp, write_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf import weight_files
from holdfast.engine.hf.safetensors_layout import WEIGHTS_NAME, TensorSpec, plan_layout
from holdfast.engine.hf.weight_files import WeightReader, WeightWriter
from holdfast.engine.memory.host_blocks import HostBlocks
from holdfast.engine.memory.offloaded import host_copies
from holdfast.engine.memory.tensors import flatten
from holdfast.engine.memory.weight_changes import WriteWatch
from holdfast.engine.staging.offload import Offload
from holdfast.engine.staging.staged_state import Staging
from holdfast.engine.training import host_optimizer
from holdfast.engine.training.microbatch import weigh
from holdfast.engine.training.packed_batch import MicroBatch
from holdfast.utils.errors import EngineOffloadedError, TornSnapshotError
from holdfast.utils.manifest import described_digest
from holdfast.utils.pieces import Piece, join_digests, piece_digest
from holdfast.utils.rng import capture_rng, derive_rng, restore_rng
from tests.engine.staging.test_interrupts import interrupt, moments_of
from tests.simulated_cuda import device

pytestmark = pytest.mark.simulated_gpu

Values = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def no_race_and_no_memory_unregistered_in_use() -> Iterator[None]:
    device.install()  # forgets earlier races
    before = device.counts()["unregistered_in_use"]
    yield
    gc.collect()
    assert device.counts()["unregistered_in_use"] == before
    assert device.races() == []


@pytest.fixture(params=[0, 1])
def on(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of a rank, while device 0 is current."""
    yield torch.device("cuda", request.param)


def trained(on: torch.device) -> DCPState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3)).to(on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = DCPState(model, optimizer, changes_only_in_step=True)
    step(state)
    return state


def step(state: DCPState, seed: int = 0) -> None:
    assert state.optimizer is not None
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    state.model(inputs.to(next(state.model.parameters()).device)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def values_of(state: DCPState) -> Values:
    return {name: tensor.cpu().clone() for name, tensor in flatten(state.state_dict())}


def differing(found: Values, expected: Values) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not torch.equal(found[name].cpu(), expected[name])]


def test_staged_values_are_those_of_their_step(on: torch.device) -> None:
    """No wait comes between the step and the snapshot, nor between the snapshot and the next
    step.
    """
    state, twin = trained(on), trained(on)
    staging = Staging(state.model)
    staging.prepare(state)
    for seed in range(3):
        step(twin, seed)
        expected = values_of(twin)
        step(state, seed)
        staged = staging.stage(state)
        step(state, seed + 10)
        step(twin, seed + 10)
        staging.finish()
        assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_staged_values_may_be_read_as_soon_as_the_copy_is_finished(on: torch.device) -> None:
    state = trained(on)
    staging, expected = Staging(state.model), values_of(state)
    staged = staging.stage(state)
    staging.finish()
    assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_everything_is_copied_on_return_without_a_promise(on: torch.device) -> None:
    state = trained(on)
    state.changes_only_in_step = False
    staging, expected = Staging(state.model), values_of(state)
    staged = staging.stage(state)
    with torch.no_grad():
        for tensor in state.live_tensors().values():
            tensor.zero_()
    assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_weights_may_change_in_a_block_that_says_so(on: torch.device) -> None:
    state = trained(on)
    staging, expected = Staging(state.model), values_of(state)
    staged = staging.stage(state)
    with changing_weights(state.model), torch.no_grad():
        for parameter in state.model.parameters():
            parameter.data.mul_(2)
    staging.finish()
    assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_a_second_snapshot_of_the_same_step_waits_for_the_first(on: torch.device) -> None:
    """Else the first copy, which no step waits for any more, would read the weights of a later
    step.
    """
    state = trained(on)
    staging, expected = Staging(state.model), values_of(state)
    staging.stage(state)
    staged = staging.stage(state)
    step(state, 1)
    staging.finish()
    torch.cuda.synchronize(on)
    assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_moments_that_are_dropped_during_the_copy_are_in_the_snapshot(on: torch.device) -> None:
    state = trained(on)
    staging, expected = Staging(state.model), values_of(state)
    staged = staging.stage(state)
    assert state.optimizer is not None
    state.optimizer.state.clear()
    torch.full((64, 64), 9.0, device=on).add_(1)  # may be in their memory
    staging.finish()
    assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_buffers_are_pinned(on: torch.device) -> None:
    state = trained(on)
    staging = Staging(state.model)
    staged, live = dict(flatten(staging.stage(state))), dict(flatten(state.state_dict()))
    assert {name for name, buffer in staged.items() if not buffer.is_pinned()} == {
        name for name, tensor in live.items() if not tensor.is_cuda
    }
    staging.release()


def test_a_write_during_the_copy_is_noticed(
    in_mode: Callable[[str], None], on: torch.device
) -> None:
    in_mode("late-copies")
    state = trained(on)
    staging = Staging(state.model)
    staging.stage(state)
    with torch.no_grad():
        state.model[0].weight.data.mul_(2)  # type: ignore[index]
    with pytest.raises(TornSnapshotError, match=r"model\.0\.weight"):
        staging.finish()
    staging.release()


def test_buffers_are_unpinned_when_the_copy_is_done_and_never_before(on: torch.device) -> None:
    gc.collect()
    state, before = trained(on), device.counts()
    staging = Staging(state.model)
    staging.stage(state)
    assert device.counts()["registered"] == before["registered"] + 1
    staging.release()
    del staging
    gc.collect()
    assert device.counts()["unregistered"] == before["unregistered"] + 1


def test_buffers_that_are_dropped_are_unpinned_when_their_copy_is_done(on: torch.device) -> None:
    """A user drops an engine without a call of ``destroy``."""
    gc.collect()
    state, before = trained(on), device.counts()
    staging = Staging(state.model)
    staging.stage(state)
    del staging, state
    gc.collect()
    assert device.counts()["unregistered"] == before["unregistered"] + 1


def test_refused_memory_is_one_error_and_the_next_snapshot_is_taken(
    faults: Callable[[str, int], None], on: torch.device
) -> None:
    state = trained(on)
    staging, expected = Staging(state.model), values_of(state)
    faults("host_register", 1)
    with pytest.raises(RuntimeError, match=r"CUDA cannot pin .* bytes of host memory"):
        staging.stage(state)
    staged = staging.stage(state)
    staging.finish()
    assert differing(dict(flatten(staged)), expected) == []
    staging.release()


def test_no_copy_is_under_way_after_a_snapshot_that_could_not_begin(
    on: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would wait for it, and the buffers may be unmapped next."""

    def fail(_: WriteWatch) -> None:
        raise RuntimeError("no pinned memory for the samples")

    state = trained(on)
    staging = Staging(state.model)
    with monkeypatch.context() as patched:
        patched.setattr(WriteWatch, "fetch_samples", fail)
        with pytest.raises(RuntimeError, match="no pinned memory"):
            staging.stage(state)
    staging.release()


def test_an_offloaded_state_comes_back_with_the_values_of_its_step(on: torch.device) -> None:
    """The step before is still under way, and the memory is given away as soon as it is free."""
    state, twin = trained(on), trained(on)
    offload = Offload(state, on, None)  # type: ignore[arg-type]
    for seed in range(3):
        step(state, seed)
        step(twin, seed)
        offload.offload({"weights", "optimizer"})
        held = [
            tensor
            for tensor in state.live_tensors(readable=False).values()
            if tensor.is_cuda and tensor.dim()
        ]
        assert [tensor for tensor in held if tensor.untyped_storage().nbytes()] == []
        taken = torch.full((1 << 16,), 9.0, device=on)
        copies = {
            name: tensor.clone() for name, tensor in flatten(state.state_dict()) if tensor.dim()
        }
        assert (
            differing(
                copies, {name: tensor for name, tensor in values_of(twin).items() if tensor.dim()}
            )
            == []
        )
        del taken
        offload.onload({"weights", "optimizer"})
        for copy in host_copies_in(offload):
            copy.fill_(7)  # as the next snapshot may
        step(state, seed + 10)
        step(twin, seed + 10)
        assert differing(values_of(state), values_of(twin)) == []


def host_copies_in(offload: Offload) -> list[torch.Tensor]:
    return [tensor for buffers in offload._kept for tensor in buffers.tensors.values()]


ALL = {"weights", "optimizer"}


@pytest.mark.parametrize("interrupted", ["offload", "onload"])
def test_after_an_interrupt_at_any_line_an_onload_brings_every_bit_back(
    on: torch.device, interrupted: str
) -> None:
    state, twin = trained(on), trained(on)
    offload = Offload(state, on, None)  # type: ignore[arg-type]
    call = partial(getattr(offload, interrupted), ALL)
    offload.offload(ALL)
    offload.onload(ALL)
    if interrupted == "onload":
        offload.offload(ALL)
    moments = moments_of(call, opcodes=False)
    offload.onload(ALL)
    for seed, moment in enumerate(moments):
        step(state, seed)
        step(twin, seed)
        if interrupted == "onload":
            offload.offload(ALL)
        interrupt(call, moment, opcodes=False)
        if seed % 2:
            offload.offload(ALL)
        taken = torch.full((1 << 16,), 9.0, device=on)
        copies = {
            name: tensor.clone() for name, tensor in flatten(state.state_dict()) if tensor.dim()
        }
        assert (
            differing(
                copies, {name: tensor for name, tensor in values_of(twin).items() if tensor.dim()}
            )
            == []
        )
        del taken
        offload.onload(ALL)
        for copy in host_copies_in(offload):
            copy.fill_(7)  # as the next snapshot may
        assert differing(values_of(state), values_of(twin)) == []


def test_an_engine_leaves_with_the_snapshot_that_is_being_copied(on: torch.device) -> None:
    state, twin = trained(on), trained(on)
    offload, staging = Offload(state, on, None), Staging(state.model)  # type: ignore[arg-type]
    staged = dict(flatten(staging.stage(state)))
    offload.offload({"weights", "optimizer"})
    lent = host_copies(state.model)["model.0.weight"]
    assert lent.data_ptr() == staged["model.0.weight"].data_ptr()
    torch.full((1 << 16,), 9.0, device=on)
    staging.finish()
    assert differing(staged, values_of(twin)) == []
    offload.onload({"weights", "optimizer"})
    step(state, 1)
    step(twin, 1)
    assert differing(values_of(state), values_of(twin)) == []
    staging.release()


def test_a_snapshot_that_is_lent_is_complete(on: torch.device) -> None:
    state, twin = trained(on), trained(on)
    staging = Staging(state.model)
    staging.stage(state)
    live = {name: tensor for name, tensor in flatten(state.state_dict()) if tensor.is_cuda}
    lent = staging.lend(live, staging, set())
    found = {name: each.clone() for name, each in lent.items()}
    expected = values_of(twin)
    assert found and differing(found, {name: expected[name] for name in found}) == []
    staging.release()


def test_an_engine_that_does_not_fit_stays_away(
    faults: Callable[[str, int], None], on: torch.device
) -> None:
    state, twin = trained(on), trained(on)
    offload = Offload(state, on, None)  # type: ignore[arg-type]
    offload.offload({"weights", "optimizer"})
    faults("allocation", 1)
    with pytest.raises(torch.OutOfMemoryError):
        offload.onload({"weights", "optimizer"})
    assert all(
        not t.untyped_storage().nbytes()
        for t in state.live_tensors(readable=False).values()
        if t.is_cuda and t.dim()
    )
    with pytest.raises(EngineOffloadedError):
        offload.require_onloaded("weights")
    offload.onload({"weights", "optimizer"})
    assert differing(values_of(state), values_of(twin)) == []


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_an_optimizer_on_the_host_steps_as_one_on_the_device(
    on: torch.device, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BLOCK_BYTES", block_bytes)
    state, twin = trained(on), trained(on)
    state.optimizer = host_optimizer.on_host(torch.optim.AdamW)(state.model.parameters(), lr=0.1)
    twin.optimizer = torch.optim.AdamW(twin.model.parameters(), lr=0.1)
    for seed in range(3):
        step(state, seed)
        step(twin, seed)
        moments = [
            tensor for name, tensor in state.live_tensors().items() if name.startswith("optim")
        ]
        assert len(moments) > 9 and not any(tensor.is_cuda for tensor in moments)
        assert (
            differing({n: t.clone() for n, t in flatten(state.state_dict())}, values_of(twin)) == []
        )
    expected = values_of(state)
    save_dcp(tmp_path / "saved", state)
    step(state)
    load_dcp(tmp_path / "saved", state)
    assert differing(values_of(state), expected) == []


SIZES = ([7], [3] * 7, [8] * 6, [1, 8, 2, 20, 3, 4, 0, 5, 8, 8])


@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_take_values_from_the_device(on: torch.device, sizes: list[int]) -> None:
    pieces = [torch.randn(n, dtype=torch.float64) for n in sizes]
    there = [piece.to(on) for piece in pieces]
    copies = (
        piece.clone() for piece in there
    )  # freed while they are packed, and nothing waits for the device
    found = b"".join(bytes(block) for block in HostBlocks(8 * 4, on).pack(copies, torch.float32))
    assert found == torch.cat(pieces).float().numpy().tobytes()


@pytest.mark.parametrize("sizes", SIZES)
def test_blocks_bring_values_to_the_device(on: torch.device, sizes: list[int]) -> None:
    pieces = [torch.randn(n) for n in sizes]
    targets = [torch.empty(n, dtype=torch.float64, device=on) for n in sizes]
    blocks = HostBlocks(8 * 4, on)
    for piece, target in zip(pieces, targets, strict=True):
        block = blocks.take(piece.nbytes).view(torch.float32)
        block.copy_(piece)
        blocks.copy(target, block)
    blocks.drain()
    del blocks
    assert [target.cpu().float().tolist() for target in targets] == [
        piece.tolist() for piece in pieces
    ]


def test_a_drained_block_may_be_filled_again(on: torch.device) -> None:
    blocks, target = HostBlocks(64, on), torch.empty(16, device=on)
    block = blocks.take(64).view(torch.float32)
    block.fill_(1)
    blocks.copy(target, block)
    blocks.drain()
    block.fill_(2)
    assert target.unique().tolist() == [1.0]


def test_a_saved_state_is_loaded(on: torch.device, tmp_path: Path) -> None:
    state = trained(on)
    expected = values_of(state)
    save_dcp(tmp_path / "saved", state)
    step(state)
    load_dcp(tmp_path / "saved", state)
    assert differing(values_of(state), expected) == []


def test_a_staged_state_is_saved_as_the_live_one(on: torch.device, tmp_path: Path) -> None:
    """To the byte. ``.metadata`` does not say which values were in pinned memory."""
    state, staging = trained(on), Staging(trained(on).model)
    (tmp_path / "live").mkdir()
    (tmp_path / "staged").mkdir()
    write_dcp(tmp_path / "live", state)
    staged = staging.stage(state)
    staging.finish()
    DCPSaver().write(tmp_path / "staged", staged)
    for path in (tmp_path / "live").iterdir():
        assert path.read_bytes() == (tmp_path / "staged" / path.name).read_bytes(), path.name
    staging.release()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weight_files_hold_the_values_of_the_device_and_bring_them_back(
    on: torch.device, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "WRITE_BYTES", 64)
    monkeypatch.setattr(weight_files, "READ_BYTES", 64)
    given = {
        "a": torch.randn(9, 11).to(on),
        "b": torch.randn(100).to(on),
        "c": torch.randn(8, 8).to(on).t(),
    }
    layout = plan_layout(
        [TensorSpec(k, tuple(v.shape), stored, k, 0) for k, v in given.items()], 10**9, 0
    )
    seen: list[tuple[Piece, bytes]] = []
    with WeightWriter(
        tmp_path, lambda _, piece, data: seen.append((piece, piece_digest(data)))
    ) as writer:
        for file in layout.files:
            writer.create(file)
        for name, values in given.items():
            writer.write(layout.slots[name], 0, values)
        writer.sync()
    pieces, digests = zip(*sorted(writer.digests[WEIGHTS_NAME]), strict=True)
    assert described_digest(tmp_path / WEIGHTS_NAME, {"pieces": pieces}) == join_digests(digests)
    assert writer.digests[WEIGHTS_NAME][-len(seen) :] == seen
    expected = {name: values.cpu().to(stored) for name, values in given.items()}
    found = load_file(tmp_path / WEIGHTS_NAME)
    assert all(torch.equal(found[name], expected[name]) for name in given)
    targets = {name: torch.empty_like(values) for name, values in given.items()}
    with WeightReader(tmp_path) as files:
        slots = files.layout()
        for name, target in targets.items():
            files.read(slots[name], 0, target)
    assert all(
        torch.equal(target.cpu().to(stored), expected[name]) for name, target in targets.items()
    )


@pytest.mark.parametrize("other_stream", [False, True])
def test_a_load_is_ordered_with_the_stream_of_its_caller(
    on: torch.device, other_stream: bool, tmp_path: Path
) -> None:
    """Threads read the files. The step before is still under way, and the values are used at
    once.
    """
    state = trained(on)
    expected = values_of(state)
    save_dcp(tmp_path / "saved", state)
    stream = torch.cuda.Stream(on) if other_stream else torch.cuda.current_stream(on)
    stream.wait_stream(torch.cuda.current_stream(on))
    with torch.cuda.stream(stream):
        step(state)
        with torch.no_grad():
            for tensor in state.live_tensors().values():
                tensor.mul_(2)
        load_dcp(tmp_path / "saved", state)
        assert (
            differing({name: tensor + 0 for name, tensor in flatten(state.state_dict())}, expected)
            == []
        )


def test_a_load_ends_with_the_error_of_its_copies(
    faults: Callable[[str, int], None], on: torch.device, tmp_path: Path
) -> None:
    given = torch.randn(64).to(on)
    layout = plan_layout([TensorSpec("a", (64,), torch.float32, "a", 0)], 10**9, 0)
    with WeightWriter(tmp_path) as writer:
        writer.create(layout.files[0])
        writer.write(layout.slots["a"], 0, given)
        writer.sync()
    with pytest.raises(torch.AcceleratorError), WeightReader(tmp_path) as files:
        slot = files.layout()["a"]
        faults("copy", 1)
        files.read(slot, 0, given)


def test_a_dcp_load_ends_with_the_error_of_its_copies(
    faults: Callable[[str, int], None],
    on: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, ended, read_all = (
        DCPState(nn.Linear(4, 3, bias=False).to(on)),
        list[str](),
        reader._read_all,
    )
    save_dcp(tmp_path / "saved", state)

    def read_and_lose_the_device(*arguments: Any) -> None:
        faults("copy", 1)
        try:
            read_all(*arguments)
        except torch.AcceleratorError:
            ended.append("error")
            raise

    monkeypatch.setattr(reader, "_read_all", read_and_lose_the_device)
    with pytest.raises(torch.AcceleratorError):
        load_dcp(tmp_path / "saved", state)
    assert ended, "the threads of the load did not wait for their copies"


def test_a_micro_batch_that_is_moved_to_the_host_is_there(on: torch.device) -> None:
    batch = {
        "input_ids": torch.arange(12).view(3, 4),
        "attention_mask": torch.ones(3, 4, dtype=torch.int64),
    }
    there = MicroBatch(batch, torch.arange(3), lengths=(4, 4, 4)).to(on)
    back = there.to("cpu")
    assert all(torch.equal(back.data[key].clone(), tensor) for key, tensor in batch.items())
    assert back.indices.tolist() == [0, 1, 2]


@pytest.mark.parametrize("current", [0, 1])
def test_random_numbers_of_the_device_go_on_after_a_restore(current: int) -> None:
    with torch.cuda.device(current):
        torch.rand(3, device="cuda")
        state = capture_rng()
        assert state["cuda"].shape == (device.DEVICES, 16)
        drawn = torch.rand(3, device="cuda")
        restore_rng(state)
        assert torch.equal(torch.rand(3, device="cuda"), drawn)
        restore_rng(derive_rng(state, 5))
        assert not torch.equal(torch.rand(3, device="cuda"), drawn)


def test_weights_of_a_loss_on_both_devices_are_added_up(on: torch.device) -> None:
    class Micro:
        def __init__(self, number: float) -> None:
            self.data = {"number": torch.tensor(number, device=on)}

    found = weigh([Micro(2.0), Micro(3.0)], lambda data: data["number"] * 2)  # type: ignore[list-item]
    assert found == [4.0, 6.0]
