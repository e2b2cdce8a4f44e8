"""Every wait of the product for a device, taken out in turn: which test fails without it.

The waits are those that grep finds for ``wait``, ``synchronize``, ``record``, ``non_blocking`` and
``drain`` in engine/, recover/ and utils/, and those of their callers. Waits for host threads alone
are not among them.

``python -m tests.simulated_cuda.mutations`` prints the table, and takes a few minutes.
"""

import json
import re
import sys
from dataclasses import dataclass

from tests.simulated_cuda.__main__ import run_pytest
from tests.simulated_cuda.mutated import VARIABLE

STAGED_STATE = "holdfast.engine.staging.staged_state"
WEIGHT_CHANGES = "holdfast.engine.memory.weight_changes"
OFFLOAD = "holdfast.engine.staging.offload"
HOST_OPTIMIZER = "holdfast.engine.training.host_optimizer"
PINNED = "holdfast.engine.memory.pinned"
HOST_BLOCKS = "holdfast.engine.memory.host_blocks"
DCP_READER = "holdfast.engine.dcp.reader"
HF_FILES = "holdfast.engine.hf.weight_files"
PACKED_BATCH = "holdfast.engine.training.packed_batch"


@dataclass(frozen=True)
class Mutation:
    """A wait that is taken out.

    Attributes:
        name: the wait.
        module: module of Holdfast.
        old: text with the wait.
        new: text without it.
        mode: mode of the device in which it shows.
        test: test of ``test_holdfast.py`` that fails, without ``test_``.
    """

    name: str
    module: str
    old: str
    new: str
    mode: str
    test: str


STAGED = "staged_values_are_those_of_their_step"
COPIES, KERNELS = "late-copies", "late-kernels"

MUTATIONS = (
    Mutation(
        "the copy waits for the step before it",
        STAGED_STATE,
        "stream.wait_stream(torch.cuda.current_stream(device))",
        "pass",
        KERNELS,
        STAGED,
    ),
    Mutation(
        "the end of the copy is recorded",
        STAGED_STATE,
        "self._event.record(stream)",
        "pass",
        COPIES,
        STAGED,
    ),
    Mutation(
        "the next step waits for the copy, on the device",
        STAGED_STATE,
        "self._event.wait(torch.cuda.current_stream(self._device))",
        "pass",
        COPIES,
        STAGED,
    ),
    Mutation(
        "the next step waits for the copy: the hook",
        STAGED_STATE,
        "self._wait_before_steps_of(state.optimizer)",
        "pass",
        COPIES,
        STAGED,
    ),
    Mutation(
        "readers of the buffers wait for the copy, on the host",
        STAGED_STATE,
        "self._event.synchronize()",
        "pass",
        COPIES,
        "staged_values_may_be_read_as_soon_as_the_copy_is_finished",
    ),
    Mutation(
        "finish waits",
        STAGED_STATE,
        "        for copy in self._copies:\n            copy.finish()",
        "        pass",
        COPIES,
        "staged_values_may_be_read_as_soon_as_the_copy_is_finished",
    ),
    Mutation(
        "finish waits before it compares samples",
        STAGED_STATE,
        "        self.drop()\n        if self._watch is not None:\n            _refuse_torn",
        "        if self._watch is not None:\n            _refuse_torn",
        COPIES,
        STAGED,
    ),
    Mutation(
        "what is not left to the step is copied on return",
        STAGED_STATE,
        "buffers):\n            copy.finish()",
        "buffers):\n            pass",
        COPIES,
        "everything_is_copied_on_return_without_a_promise",
    ),
    Mutation(
        "a second snapshot waits for the first",
        STAGED_STATE,
        "        self.wait()\n        self.done()\n        staged = ",
        "        self.done()\n        staged = ",
        COPIES,
        "a_second_snapshot_of_the_same_step_waits_for_the_first",
    ),
    Mutation(
        "tensors that are being copied are kept alive",
        WEIGHT_CHANGES,
        "        self._samples = _sample(sampled)\n",
        "        self._samples = _sample(sampled)\n        self._live = []\n",
        COPIES,
        "moments_that_are_dropped_during_the_copy_are_in_the_snapshot",
    ),
    Mutation(
        "buffers are given up after the copy",
        STAGED_STATE,
        "            copy.drop()\n        self.done()\n        self._copies",
        "            pass\n        self.done()\n        self._copies",
        COPIES,
        "buffers_are_unpinned_when_the_copy_is_done_and_never_before",
    ),
    Mutation(
        "buffers of a dropped staging are unpinned after the copy",
        STAGED_STATE,
        "                    copy.drop()\n\n    def _wait",
        "                    pass\n\n    def _wait",
        COPIES,
        "buffers_that_are_dropped_are_unpinned_when_their_copy_is_done",
    ),
    Mutation(
        "no copy is under way if a snapshot cannot begin",
        STAGED_STATE,
        "            if self._watch is not None:\n                self._watch.fetch_samples()  # "
        "first: nothing waits for copies if it raises\n            for _, live, buffer in "
        "transfers:\n                buffer.copy_(local_tensor(live), non_blocking=True)\n",
        "            for _, live, buffer in transfers:\n"
        "                buffer.copy_(local_tensor(live), non_blocking=True)\n"
        "            if self._watch is not None:\n"
        "                self._watch.fetch_samples()\n",
        COPIES,
        "no_copy_is_under_way_after_a_snapshot_that_could_not_begin",
    ),
    Mutation(
        "samples that another stream reads are recorded there",
        WEIGHT_CHANGES,
        "sample.record_stream(torch.cuda.current_stream(sample.device))",
        "pass",
        COPIES,
        STAGED,
    ),
    Mutation(
        "a block that changes weights waits for readers",
        WEIGHT_CHANGES,
        "    wait_for_readers(model, of_frozen=True)\n    _CHANGING",
        "    _CHANGING",
        COPIES,
        "weights_may_change_in_a_block_that_says_so",
    ),
    Mutation("readers are waited for", WEIGHT_CHANGES, "reader.wait()", "pass", COPIES, STAGED),
    Mutation(
        "an offload waits for its copies",
        OFFLOAD,
        "torch.cuda.synchronize(self._device)",
        "pass",
        COPIES,
        "an_offloaded_state_comes_back_with_the_values_of_its_step",
    ),
    Mutation(
        "an onload waits for its copies",
        OFFLOAD,
        "        self._synchronize()\n\n        for name in coming",
        "        for name in coming",
        COPIES,
        "an_offloaded_state_comes_back_with_the_values_of_its_step",
    ),
    Mutation(
        "a snapshot is complete when its buffers are lent",
        STAGED_STATE,
        "        try:\n            self.finish()\n        except",
        "        try:\n            pass\n        except",
        COPIES,
        "a_snapshot_that_is_lent_is_complete",
    ),
    Mutation(
        "an optimizer on the host waits for its state",
        HOST_OPTIMIZER,
        "torch.cuda.current_stream(device).synchronize()",
        "pass",
        COPIES,
        "an_optimizer_on_the_host_steps_as_one_on_the_device",
    ),
    Mutation(
        "samples of live tensors are there when they are compared",
        WEIGHT_CHANGES,
        "torch.cuda.current_stream(device).synchronize()",
        "pass",
        COPIES,
        "an_engine_leaves_with_the_snapshot_that_is_being_copied",
    ),
    Mutation(
        "buffers are pinned",
        PINNED,
        "mapping.pin(memory.data_ptr(), device)",
        "pass",
        COPIES,
        "buffers_are_pinned",
    ),
    Mutation(
        "buffers are unpinned",
        PINNED,
        "cudart.cudaHostUnregister(address)",
        "pass",
        COPIES,
        "buffers_are_unpinned_when_the_copy_is_done_and_never_before",
    ),
    Mutation(
        "a refusal to pin is an error",
        PINNED,
        "        if result:",
        "        if False:",
        COPIES,
        "refused_memory_is_one_error_and_the_next_snapshot_is_taken",
    ),
    Mutation(
        "a block is taken when its last copy is done",
        HOST_BLOCKS,
        "        self._wait(self._turn)\n",
        "",
        COPIES,
        "blocks_bring_values_to_the_device",
    ),
    Mutation(
        "the end of the copy of a block is kept",
        HOST_BLOCKS,
        "self._copies[self._turn][device] = event",
        "pass",
        COPIES,
        "blocks_take_values_from_the_device",
    ),
    Mutation(
        "the end of the copy of a block is recorded",
        HOST_BLOCKS,
        "event.record(torch.cuda.current_stream(device))",
        "pass",
        COPIES,
        "blocks_take_values_from_the_device",
    ),
    Mutation(
        "a block waits on the host",
        HOST_BLOCKS,
        "            event.synchronize()\n",
        "            pass\n",
        COPIES,
        "blocks_take_values_from_the_device",
    ),
    Mutation(
        "packed values are given when they are copied",
        HOST_BLOCKS,
        "                    self._wait(turn)\n                    yield values",
        "                    yield values",
        COPIES,
        "blocks_take_values_from_the_device",
    ),
    Mutation(
        "the last packed values are given when they are copied",
        HOST_BLOCKS,
        "            self._wait(turn)\n            yield values",
        "            yield values",
        COPIES,
        "blocks_take_values_from_the_device",
    ),
    Mutation(
        "drained blocks may be filled again",
        HOST_BLOCKS,
        "        for turn in range(len(self._blocks)):\n            self._wait(turn)",
        "        pass",
        COPIES,
        "a_drained_block_may_be_filled_again",
    ),
    Mutation(
        "a DCP load copies on the stream of its caller",
        DCP_READER,
        "torch.cuda.stream(stream)",
        "torch.cuda.device(stream.device)",
        KERNELS,
        "a_load_is_ordered_with_the_stream_of_its_caller",
    ),
    Mutation(
        "a DCP load ends when its copies have ended",
        DCP_READER,
        "        blocks.drain()\n",
        "",
        COPIES,
        "a_dcp_load_ends_with_the_error_of_its_copies",
    ),
    Mutation(
        "a load of weights ends when its copies have ended",
        HF_FILES,
        "            blocks.drain()\n",
        "            pass\n",
        COPIES,
        "a_load_ends_with_the_error_of_its_copies",
    ),
    Mutation(
        "a micro-batch is on the host on return",
        PACKED_BATCH,
        'ahead = torch.device(device).type == "cuda"',
        "ahead = True",
        COPIES,
        "a_micro_batch_that_is_moved_to_the_host_is_there",
    ),
)


def is_found(mutation: Mutation) -> tuple[bool, str]:
    """Whether the test fails without the wait, and the output of pytest."""
    described = json.dumps([mutation.module, mutation.old, mutation.new])
    arguments = ["-q", "-x", "tests/simulated_cuda/test_holdfast.py", "-k", f"test_{mutation.test}"]
    done = run_pytest(mutation.mode, *arguments, quiet=True, **{VARIABLE: described})
    output = done.stdout + done.stderr
    return done.returncode == 1 and re.search(r"\b1 (failed|error)\b", output) is not None, output


def main() -> int:
    width = max(len(mutation.name) for mutation in MUTATIONS)
    missed = 0
    for mutation in MUTATIONS:
        found, _ = is_found(mutation)
        missed += not found
        module = mutation.module.removeprefix("holdfast.")
        verdict = f"fails: test_{mutation.test}" if found else "NOT FOUND"
        print(f"{mutation.name:{width}}  {module}  {mutation.mode}  {verdict}", flush=True)
    print(f"{len(MUTATIONS)} waits taken out, {missed} not found")
    return missed


if __name__ == "__main__":
    sys.exit(main())
