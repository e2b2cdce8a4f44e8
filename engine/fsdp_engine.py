"""`FSDPEngine`: one model sharded over ranks with FSDP2, its training step, and its save and load.

All ranks call the same methods in the same order. Bad input and failures to read or write on one
rank are errors on all ranks. An error inside a forward or backward (loss function, out of memory)
leaves the other ranks waiting until ``timeout_s``, or until a `WorkerGroup` ends them.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from ..utils.config import require_range
from ..utils.devices import free_cached_memory
from ..utils.distributed import all_ranks_succeed, gather_numbers, rank_zero_decides
from ..utils.errors import BatchError, ConfigError
from ..utils.heartbeat import beat
from ..utils.logging import get_logger
from ..utils.metrics import RunningMeans, reduce_stats
from .api import (
    Batch,
    FinetuneSpec,
    LossFn,
    LossWeightFn,
    ParallelStrategy,
    PostFn,
    SaveLoadMeta,
    Stateful,
    Trajectories,
    WeightUpdateMeta,
)
from .config import TrainEngineConfig
from .dcp.base_model import BaseFolder
from .dcp.load import load_dcp
from .dcp.save import save_dcp
from .dcp.state import DCPState
from .hf.adapter_folder import load_adapters, save_adapters
from .hf.save import export_hf
from .hf.sidecars import adopt_base
from .lora.adapters import adapters_off
from .lora.build import require_adapters_for, require_base
from .model.initial_model import base_of, build_initial_model, cut_rules, load_weights
from .model_folder import find_model_folder
from .servers.api import InferenceServer
from .servers.fleet import ServerFleet
from .servers.publish import PublishedWeights, ServerConnection
from .staging.background_save import BackgroundSave
from .staging.offload import TAGS, WEIGHTS, Offload, checked_tags
from .staging.staged_model import exportable_model
from .training.batch import join_trajectories, map_tensors, split_like
from .training.counters import EngineCounters
from .training.gradient_sync import accumulating, drop_partial, syncs_last
from .training.head import ScoringHead
from .training.meshes import Meshes
from .training.microbatch import (
    NO_RULES,
    WeighedBatch,
    split_and_weigh,
    split_batch,
    unpack,
)
from .training.model import describe_parameters
from .training.model_output import (
    ModelOutput,
    model_output,
    nothing_of,
    own_output,
    scalar_loss,
    through_model,
)
from .training.optimizer import build_scheduler, optimizer_for
from .training.optimizer_step import clip_and_step
from .training.packed_batch import MicroBatch
from .training.process_groups import ProcessGroups, close_process_groups, open_process_groups
from .training.profiling import StepProfiler, phase, profiler_of
from .training.route_replay import RouteReplay
from .training.routers import Routers
from .training.shared_prompts import warn_of_copies
from .training.speed import Speed

logger = get_logger(__name__)

_NO_MODEL = "the engine has no model; call create_process_group and initialize first"


class FSDPEngine:
    """An AReaL-style training engine.

    Example, on every rank::

        engine = FSDPEngine(TrainEngineConfig(path="Qwen/Qwen3-0.6B"))
        engine.create_process_group()
        spec = FinetuneSpec(total_train_epochs=1, dataset_size=7473, train_batch_size=64)
        engine.initialize(None, spec)
        stats = engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
        engine.step_lr_scheduler()
        engine.save(SaveLoadMeta("/data/step_0", weight_format="dcp", with_optim=True))
        engine.destroy()
    """

    def __init__(self, config: TrainEngineConfig) -> None:
        self.config = config
        self.counters = EngineCounters()
        self._groups: ProcessGroups | None = None
        self._background: BackgroundSave | None = None
        self._servers = ServerConnection()
        self._train_stats = RunningMeans()

        # `initialize` builds these.
        self._model: PreTrainedModel | None = None
        self._folder: Path | None = None
        self._base: BaseFolder | None = None
        # dtype of the weights in config.path, and the default for exports
        self.base_dtype: torch.dtype | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
        self._scoring_head: ScoringHead | None = None
        self._routers: Routers | None = None
        self._replay: RouteReplay | None = None
        self._speed: Speed | None = None
        self.profiler: StepProfiler | None = None
        self._rules = NO_RULES
        self._sync_last = False
        self._offload: Offload | None = None

    # Lifecycle

    def create_process_group(self, parallel_strategy: ParallelStrategy | None = None) -> None:
        """Join the default process group, or create it: of the ranks of torchrun, of the tasks of
        ``srun python train.py``, or of this process alone. Later calls do nothing.

        Args:
            parallel_strategy: the mesh. None takes config keys ``backend`` and
                ``fsdp.replicate_size``.

        Raises:
            ConfigError: on every rank. The mesh does not fit the ranks or the config. Or see
                `open_process_groups`.
        """
        if self._groups is None:
            strategy = self.config.mesh_of(parallel_strategy)
            self._groups = open_process_groups(strategy, self.config.device, self.config.timeout_s)

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec) -> None:
        """Build the sharded model with its weights, the optimizer and the schedule. A second call
        replaces them.

        Args:
            addr: unused, from AReaL's signature.
            ft_spec: length of the run, for the schedule.

        Raises:
            ConfigError, CheckpointError, PeerError: on every rank, see `find_model_folder` and
                `build_initial_model`.
            Exception: a background save of the old model failed.
        """
        groups = self._require_groups()
        started = time.monotonic()
        config = self.config
        meshes = groups.meshes

        # The memory of the old model is free before the new one is built. States that were
        # registered stay.
        self._drop_model()
        free_cached_memory(groups.device)
        sizes = meshes.strategy.sizes
        self.counters = EngineCounters(states=self.counters.states, mesh=sizes)
        self._train_stats = RunningMeans()

        folder = find_model_folder(config, groups.control)
        model, self._scoring_head, replay = build_initial_model(config, folder, groups)
        with all_ranks_succeed("building the optimizer", groups.control):
            if config.optimizer is not None:
                self.optimizer = optimizer_for(model, config.optimizer)
                self.lr_scheduler = build_scheduler(
                    self.optimizer, config.optimizer, ft_spec.total_train_steps
                )
                self._routers = Routers(model, config, meshes)
        has_optimizer = self.optimizer is not None
        self._sync_last = has_optimizer and syncs_last(model, config, groups)
        self.base_dtype = adopt_base(model, str(folder), groups.control)

        # The model and the ranks decide how batches are cut.
        self._speed = Speed(model, config, groups)
        self._rules = cut_rules(model, config, meshes, replay.rules, self._speed)

        self._base = base_of(config, folder, groups.control)
        self._model = model
        self._folder = folder.absolute()
        self._replay = replay
        self.profiler = profiler_of(config, groups.device)

        # The state notes the bits of frozen weights, before they change.
        state = self.dcp_state(has_optimizer)
        state.record_frozen_base()
        self._offload = Offload(state, groups.device, groups.control, config.parts_on_host)

        what = describe_parameters(model, config.train_vision)
        seconds = time.monotonic() - started
        logger.info("initialized %s in %.2f s: %s", config.path, seconds, what)

    def destroy(self) -> None:
        """Free the model and leave the groups, also after a peer's death. Then raise the error of a
        background save.
        """
        # Callbacks run in the opposite order, even if one of them raises.
        with ExitStack() as last:
            if self._groups is not None:
                last.callback(close_process_groups, self._groups)
                last.callback(free_cached_memory, self._groups.device)
            self._groups = None
            self._servers.close()
            self._drop_model()

    def _drop_model(self) -> None:
        if self.profiler is not None:
            self.profiler.close()
        self.profiler = None
        self._model = None
        self.optimizer = None
        self.lr_scheduler = None

        # These hold the model, too.
        self._scoring_head = None
        self._routers = None
        self._replay = None
        self._speed = None
        self._rules = NO_RULES
        self._offload = None

        # Last, because it raises the error of the save.
        background = self._background
        self._background = None
        if background is not None:
            background.close()

    def train(self, mode: bool = True) -> "FSDPEngine":
        """Switch the model to training (or evaluation) mode."""
        self.model.train(mode)
        return self

    def eval(self) -> "FSDPEngine":
        """Switch the model to evaluation mode."""
        return self.train(False)

    @property
    def model(self) -> PreTrainedModel:
        """The sharded module."""
        if self._model is None:
            raise ConfigError(_NO_MODEL)
        return self._model

    @property
    def model_folder(self) -> Path:
        """Local folder of the model that `initialize` started from. For a model on the hub, a
        folder in its cache.
        """
        if self._folder is None:
            raise ConfigError(_NO_MODEL)
        return self._folder

    @property
    def control_group(self) -> dist.ProcessGroup:
        """Gloo group of all ranks, for agreement."""
        return self._require_groups().control

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._require_groups().device

    # Batches

    @phase("update")
    def train_batch(
        self, batch: Trajectories, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a batch.

        The gradient is the gradient of ``sum(weight * loss) / sum(weight)`` over all micro-batches
        of all ranks, so it does not depend on how the batch was cut. If it is not finite, nothing
        is updated.

        Args:
            batch: a padded batch, or a list of them (of trajectories).
            loss_fn: see `LossFn`.
            loss_weight_fn: see `LossWeightFn`.

        Returns:
            ``loss`` (over all ranks), ``grad_norm`` (before clipping), ``lr`` (for this step),
            ``update_skipped`` (0 or 1), its complement ``update_successful``, ``n_mbs`` (also as
            ``num_micro_batches``) and ``n_tokens`` (of this rank). With experts also
            ``expert_load_max_over_mean``, over all ranks: tokens of the expert with the most,
            divided by the mean of all experts, averaged over the layers (1 is even). With
            ``router_aux_loss_coef`` also ``router_aux_loss``, without that factor. ``loss`` does
            not contain it. With ``routed_experts`` in the batch also `ROUTE_STATS`, over all ranks.
            With ``enable_tree_training`` also ``tree_token_ratio``, over all ranks:
            computed tokens, divided by those of whole sequences. ``tokens_per_second`` of all
            ranks, and ``mfu`` if it is known (see `Speed`).

        Raises:
            BatchError: the batch is malformed, no token counts on any rank, or no loss of any rank
                depends on the model. Nothing was changed.
        """
        started = time.monotonic()
        optimizer = self._require_optimizer()
        routers = self._routers
        replay = self._replay
        speed = self._speed
        assert routers is not None and replay is not None and speed is not None
        self._require_onloaded(*TAGS)
        self.train()

        weighed = self._cut(batch, loss_weight_fn, trains=True)
        micro_batches = weighed.micro_batches
        if not self.config.gradient_checkpointing:
            warn_of_copies(micro_batches[0].shared)
        meshes = self._meshes
        optimizer.zero_grad()
        routers.start_step(self.device)
        replay.start_step(self.device, weighed.has_routes)

        # Add up the gradients of all micro-batches.
        loss_sum = self._zero_loss()
        n_losses = 0
        with accumulating(
            self.model, len(micro_batches), meshes, self._sync_last
        ) as before_backward:
            for number, (mb, share) in enumerate(weighed.shares(self.device)):
                with replay.counting(mb, share):
                    with routers.recording(mb, share):
                        loss, depends = self._weighted_loss(mb, share, loss_fn)
                    before_backward(number)
                    # FSDP averages gradients over ranks, but the shares already divide by the
                    # total weight.
                    ((loss + routers.loss(share)) * meshes.fsdp.size()).backward()
                loss_sum += loss.detach()
                n_losses += depends

        of_routers = routers.statistics() | replay.statistics()
        stats = self._clip_and_step(
            loss_sum, weighed.total, weighed.correction, of_routers, n_losses
        )
        stats |= weighed.statistics(self.config.enable_tree_training)
        stats |= speed.of_step(weighed, routers.top_k, time.monotonic() - started)
        self._train_stats.add(stats)
        return stats

    def _zero_loss(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def _clip_and_step(
        self,
        loss: Tensor,
        weight: float,
        correction: float,
        more: Mapping[str, Tensor],
        n_losses: int = 1,
    ) -> dict[str, float]:
        optimizer = self._require_optimizer()
        assert self.config.optimizer is not None
        max_norm = self.config.optimizer.gradient_clipping
        # Ranks with the same data have the same loss, which counts once.
        if not self._meshes.is_head:
            loss = torch.zeros_like(loss)
            correction = 0.0
        return clip_and_step(
            self.model, optimizer, max_norm, self.counters, loss, weight, correction, more, n_losses
        )

    def _cut(
        self, batch: Trajectories, loss_weight_fn: LossWeightFn, trains: bool = False
    ) -> WeighedBatch:
        rules = replace(self._rules, needs_routes=trains)
        return split_and_weigh(
            batch, self.config.mb_spec, loss_weight_fn, self.control_group, rules
        )

    @torch.no_grad()
    def eval_batch(
        self, batch: Trajectories, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> Tensor:
        """The loss that `train_batch` would report, over all ranks, in evaluation mode: a scalar on
        the CPU.
        """
        self._require_onloaded(WEIGHTS)
        self.eval()
        weighed = self._cut(batch, loss_weight_fn)
        losses = []
        for mb, share in weighed.shares(self.device):
            with self._replaying(mb, share):
                loss, _ = self._weighted_loss(mb, share, loss_fn)
            losses.append(loss.double())

        # Each rank has the sum of its weighted losses, and its part of the correction.
        own_loss = sum(torch.stack(losses).tolist())
        gathered = gather_numbers([own_loss, weighed.correction], self._data_group)
        total_loss = sum(loss for loss, _ in gathered)
        correction = sum(correction for _, correction in gathered)
        total = weighed.total + correction
        if not total > 0:
            raise BatchError(
                f"no token of the batch counts: the loss weights of all ranks add up to {total}"
            )
        return torch.tensor(total_loss * (weighed.total / total))

    @overload
    def forward_batch(self, batch: Batch, post_fn: PostFn | None = None) -> Tensor: ...
    @overload
    def forward_batch(
        self, batch: Sequence[Batch], post_fn: PostFn | None = None
    ) -> list[Tensor]: ...
    @torch.no_grad()
    @phase("forward")
    def forward_batch(
        self, batch: Trajectories, post_fn: PostFn | None = None
    ) -> Tensor | list[Tensor]:
        """Per-token results in evaluation mode.

        Args:
            batch: this rank's share: a padded batch, or a list of them (of trajectories).
            post_fn: see `PostFn`. Default: log-probabilities of the tokens (actor) or values
                (critic).

        Returns:
            ``[batch, seqlen]`` float32 on the device of ``batch``, 0 at padding. For a list, one
            tensor per batch in the list.
        """
        self._require_onloaded(WEIGHTS)
        self.eval()
        if post_fn is None:
            post_fn = _values if self.config.is_critic else _logprobs
        micro_batches = split_batch(batch, self.config.mb_spec, self.control_group, self._rules)
        outputs = []
        for mb in micro_batches:
            moved = mb.to(self.device)
            with self._replaying(moved):
                outputs.append(post_fn(self._output(moved), moved.data).float())
        input_ids = join_trajectories(batch)["input_ids"]
        result = unpack(outputs, micro_batches, *input_ids.shape).to(input_ids.device)
        if isinstance(batch, dict):
            return result
        return split_like(result, batch)

    def _weighted_loss(self, mb: MicroBatch, share: float, loss_fn: LossFn) -> tuple[Tensor, bool]:
        """The loss times ``share``, and whether it depends on the model. Its gradient does in any
        case.
        """
        # Nothing counts here, but forward and backward must still take part in their collectives.
        if share == 0:
            beat()
            first = mb.first_token()
            sequence = self._meshes.sequence
            output = own_output(self.model, first, self.config.pack_sequences, sequence)
            return nothing_of(output), False

        output = self._output(mb)
        loss = scalar_loss(loss_fn(output, mb.data)) * share
        if torch.is_grad_enabled():
            return through_model(loss, output)
        return loss, False

    def _output(self, mb: MicroBatch) -> Any:
        """First argument of the loss functions."""
        beat()
        sequence = self._meshes.sequence
        if self.config.is_critic:
            return model_output(self.model, mb, self.config.pack_sequences, sequence)
        return ModelOutput(self.model, mb, self.config, self._scoring_head, sequence)

    def _replaying(self, mb: MicroBatch, share: float = 1.0) -> AbstractContextManager[None]:
        assert self._replay is not None
        return self._replay.of(mb, share)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside the block the engine uses its base model. ConfigError if it trains all weights."""
        require_base(self.config)
        return adapters_off(self.model)

    def step_lr_scheduler(self) -> None:
        """Advance the schedule by one, unless every update since the last call was skipped."""
        if self.counters.steps_since_schedule > 0:
            self.lr_scheduler_step()

    def all_reduce_stats(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sum each named number over the data-parallel ranks, in float64."""
        return reduce_stats(sums, self._data_group)

    def broadcast_batch(self, batch: Trajectories | None = None) -> Batch:
        """Give all ranks with the same data the batch of the first of them, their head. Collective.

        Args:
            batch: the head's, as for `train_batch`. Other ranks may pass None.

        Returns:
            The batch, padded if it was a list. On other ranks than the head its tensors are on the
            CPU.

        Raises:
            BatchError: on all of these ranks. The head gave none, or its list cannot be joined.
        """

        def joined() -> Batch:
            if batch is None:
                raise BatchError(
                    "broadcast_batch got None on the first of the ranks with the same data; give "
                    "it there"
                )
            own.update(join_trajectories(batch))
            return own

        own: Batch = {}
        peers = self._meshes.peers
        if peers is None:
            return joined()
        received = rank_zero_decides(lambda: map_tensors(joined(), Tensor.cpu), peers)
        return own or received

    # AReaL's names.

    @property
    def initialized(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    cpu_group = control_group

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Group of the ranks with the same parts of other data, with the backend of the device."""
        return cast(dist.ProcessGroup, self._meshes.data or dist.group.WORLD)

    @property
    def context_and_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks with the same data, its head first. None if every rank has its own
        data.
        """
        return self._meshes.peers

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among the ranks with different data."""
        return self._meshes.data_rank

    @property
    def data_parallel_world_size(self) -> int:
        """Number of ranks with different data."""
        return self._meshes.data_size

    def current_data_parallel_head(self) -> int:
        """The first rank with this rank's data."""
        return self.data_parallel_rank * self._meshes.ranks_with_same_data

    def is_data_parallel_head(self) -> bool:
        """Whether this rank is the first with its data."""
        return self._meshes.is_head

    def forward(self, input_: Trajectories) -> Any:
        """`forward_batch`. Its log-probabilities describe token t, AReaL's token t + 1."""
        return self.forward_batch(input_)

    def export_stats(self) -> dict[str, float]:
        """Mean over calls and ranks of each number that `train_batch` returned since the last call.
        Collective.

        Empty without a batch. The updates of an algorithm return their own statistics.
        """
        return self._train_stats.take(self._data_group)

    def optimizer_zero_grad(self) -> None:
        """Drop the gradients."""
        self._require_optimizer().zero_grad()
        drop_partial(self.model)

    def optimizer_step(self) -> dict[str, float]:
        """Clip the gradients of your own backward, and update unless they are not finite.
        Collective.

        Only for custom training steps, because `train_batch` includes it. FSDP has averaged the
        gradients over ranks.

        Returns:
            ``grad_norm`` (before clipping), ``lr``, ``update_skipped`` and ``update_successful`` (0
            or 1).
        """
        self._require_optimizer()
        self._require_onloaded(*TAGS)
        stats = self._clip_and_step(self._zero_loss(), 1.0, 0.0, {})
        del stats["loss"]
        return stats

    def set_lr(self, lr: float) -> None:
        """Set the rate of the next step. The schedule overwrites it when it advances.

        Raises:
            ConfigError: there is no optimizer, or ``lr`` is negative.
        """
        require_range("lr", lr, low=0.0)
        for group in self._require_optimizer().param_groups:
            group["lr"] = lr

    def lr_scheduler_step(self) -> None:
        """Advance the schedule by one, even without an update, unlike `step_lr_scheduler`."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
            self.counters.steps_since_schedule = 0

    # Save and load

    def register_state(self, name: str, thing: Stateful) -> None:
        """See `TrainEngine.register_state`."""
        self.counters.states[name] = thing

    def dcp_state(self, with_optim: bool = True) -> DCPState:
        """The whole content of a DCP checkpoint of this engine. `RecoverHandler` snapshots it."""
        groups = self._require_groups()
        options: dict[str, Any] = {
            "trainable_only": self.config.use_lora,
            "base": self._base,
            "group": groups.control,
            "ranks_with_same_data": groups.meshes.ranks_with_same_data,
        }
        if not with_optim:
            return DCPState(self.model, **options)
        optimizer = self._require_optimizer()
        return DCPState(
            self.model,
            optimizer,
            self.lr_scheduler,
            self.counters,
            **options,
            changes_only_in_step=True,
        )

    def save(self, meta: SaveLoadMeta, *, blocking: bool = True) -> None:
        """Write a checkpoint as the new folder ``meta.path``, which appears complete or not at all.

        Args:
            meta: format and place. Its tokenizer and processor must not change until it is written.
            blocking: False returns when the state is staged in host memory, and writes it in the
                background. Until it is written, change parameters and moments only in steps, loads
                and `changing_weights`, else the save fails. Everything else may change. The next
                save, `wait_for_save` and `destroy` wait for it. Call one of them before the process
                ends.

        Raises:
            ConfigError: ``with_optim`` without an optimizer.
            CheckpointExistsError: the folder exists and is not empty.
            CheckpointWriteError: any rank could not write.
            Exception: the previous background save failed, so this one was not started. Each
                failure is raised once.
        """
        if meta.with_optim:
            self._require_optimizer()
        require_adapters_for(self.config, meta)
        self.wait_for_save()
        if not blocking:
            if self._background is None:
                self._background = BackgroundSave(
                    self.model, self.control_group, self.config.timeout_s
                )
            state = self.dcp_state(self.optimizer is not None)
            self._background.begin(meta, state, self.base_dtype)
            return

        # Subclasses may override the method of a format.
        match meta.weight_format:
            case "dcp":
                self._save_to_dcp(meta)
            case "hf":
                self._save_to_hf(meta)
            case _:
                self._save_to_peft(meta)

    def _save_to_dcp(self, meta: SaveLoadMeta) -> None:
        save_dcp(meta.path, self.dcp_state(meta.with_optim), self.control_group)

    def _save_to_hf(self, meta: SaveLoadMeta) -> None:
        options = meta.hf_options(self.base_dtype)
        export_hf(exportable_model(self.model), meta.path, options, group=self.control_group)

    def _save_to_peft(self, meta: SaveLoadMeta) -> None:
        options = meta.hf_options(None)
        save_adapters(exportable_model(self.model), meta.path, options, group=self.control_group)

    def wait_for_save(self) -> None:
        """Wait until a background save is committed. Its failure is raised on every rank.

        In a `WorkerGroup` call it before ``shutdown``, whose time limit for `destroy` may be too
        short for a save.
        """
        if self._background is not None:
            self._background.wait()

    def load(self, meta: SaveLoadMeta) -> None:
        """Load a checkpoint. Nothing changes unless all of it is valid and fits on every rank.

        Raises:
            ConfigError: ``with_optim`` without an optimizer.
            CheckpointError: see `load_dcp` and `load_hf`.
            OSError: a file cannot be read. The message says if the model is now half loaded
                (`load_hf`).
        """
        require_adapters_for(self.config, meta, loads=True)
        self._require_onloaded(*TAGS)
        match meta.weight_format:
            case "dcp":
                self._load_from_dcp(meta)
            case "hf":
                self._load_from_hf(meta)
            case _:
                self._load_from_peft(meta)

    def _load_from_dcp(self, meta: SaveLoadMeta) -> None:
        load_dcp(meta.path, self.dcp_state(meta.with_optim), self.control_group)

    def _load_from_hf(self, meta: SaveLoadMeta) -> None:
        config = replace(self.config, path=str(self.model_folder))
        load_weights(self.model, meta.path, config, self.control_group)

    def _load_from_peft(self, meta: SaveLoadMeta) -> None:
        load_adapters(self.model, meta.path, group=self.control_group)

    # Offload

    @property
    def offloaded(self) -> frozenset[str]:
        """The parts that are offloaded now."""
        return frozenset() if self._offload is None else frozenset(self._offload.tags)

    def offload(self, tags: Collection[str] = TAGS) -> None:
        """Free the device for something else, such as an inference server. Collective.

        The values wait in host memory until `onload`, which restores every bit. Until then saves,
        snapshots, exports and `update_weights` read them there, and what computes raises
        `EngineOffloadedError`. Gradients are dropped. A save in the background goes on. A part that
        is already offloaded stays so. If `connect_engine` was called, this also runs the forward
        with which servers check what `update_weights` gives them.

            engine.offload()
            rollouts = generate()  # by servers on the same GPUs
            engine.onload()

        Args:
            tags: ``"weights"`` (parameters and buffers), ``"optimizer"`` (its state) or both.

        Raises:
            ConfigError: there is no such tag, or no model.
            OSError, RuntimeError: there is no host memory on this rank. PeerError: on another.
                Nothing was offloaded.
        """
        parts = self._require_parts()
        wanted = checked_tags(tags)
        if WEIGHTS in wanted - parts.tags:
            self._servers.before_offload(self)
        parts.offload(wanted)

    def onload(self, tags: Collection[str] = TAGS) -> None:
        """Bring back parts that `offload` moved away. Parts that are here stay. Collective.

        After Ctrl-C in it, or in `offload`, the parts count as offloaded until another call has
        finished the work.

        Raises:
            ConfigError: there is no such tag, or no model.
            RuntimeError: there is no room on the device of this rank. PeerError: on another. All
                stays offloaded, and may be tried again.
        """
        self._require_parts().onload(checked_tags(tags))

    # Versions and publishing

    def set_version(self, version: int) -> None:
        """Set the policy version of the weights."""
        self.counters.version = version

    def get_version(self) -> int:
        """Policy version of the weights."""
        return self.counters.version

    def connect_engine(
        self, servers: Sequence[InferenceServer] | ServerFleet, meta: WeightUpdateMeta
    ) -> None:
        """Set the servers for `update_weights`. Rank 0's are used and monitored until `destroy`."""
        self._servers.connect(servers, meta)

    def publication_to(self, fleet: Any, meta: WeightUpdateMeta | None = None) -> WeightUpdateMeta:
        """``meta``, or the `WeightUpdateMeta` of `connect_engine`. ConfigError if ``fleet`` is not
        connected.
        """
        return self._servers.meta_for(meta, fleet)

    @phase("publish")
    def update_weights(self, meta: WeightUpdateMeta | None = None) -> PublishedWeights:
        """Publish the weights as ``meta.version`` (or the engine's version) and wait until the
        servers confirm it.

        Raises:
            ConfigError: neither ``meta`` nor `connect_engine` was given.
            CheckpointWriteError: any rank could not write. No server was notified.
            PublishError: too few servers confirmed. WorkerLost: because a server's worker was lost.
        """
        return self._servers.publish(self, exportable_model(self.model), meta)

    def _require_parts(self) -> Offload:
        if self._offload is None:
            raise ConfigError(_NO_MODEL)
        return self._offload

    def _require_onloaded(self, *tags: str) -> None:
        self._require_parts().require_onloaded(*tags)

    def _require_groups(self) -> ProcessGroups:
        if self._groups is None:
            raise ConfigError("the engine has no process group; call create_process_group first")
        return self._groups

    @property
    def _meshes(self) -> Meshes:
        return self._require_groups().meshes

    @property
    def _data_group(self) -> dist.ProcessGroup:
        return self._meshes.data or self.control_group

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise ConfigError(
                "the engine has no optimizer, because initialize was not called or config key "
                "'optimizer' is null: it can neither train nor save one"
            )
        return self.optimizer


def _values(output: Any, _: Batch) -> Tensor:
    return output


def _logprobs(output: Any, _: Batch) -> Tensor:
    return output.logprobs
