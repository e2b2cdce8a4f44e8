"""Engine configuration, with AReaL's names where AReaL has them.

Plain dataclasses, read by `holdfast.utils.config.load_config`. They check their values, so that a
bad one fails before a process group or model exists.
"""

import re
from dataclasses import dataclass, field, replace

from ..utils.config import require_at_least, require_choice, require_numbers, require_range
from ..utils.errors import ConfigError
from .parallel_strategy import ParallelStrategy

DTYPES = ("float32", "bfloat16")
PACKED_ATTENTION = "holdfast"
"""Name of Holdfast's attention in transformers."""
ALL_LINEAR = "all-linear"
"""In ``target_modules``: every linear layer except the head."""
_IMPLEMENTATIONS = {
    "adam": ("loop", "foreach", "fused"),
    "adam_bf16": ("foreach",),
    "adam8bit": ("foreach",),
    "muon": ("loop", "foreach", "fused"),
    "sgd": ("loop", "foreach"),
}
"""Values of ``optimizer.implementation`` by ``optimizer.type``. torch has no fused SGD for
DTensors.
"""
_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16"}
_CHECKPOINTINGS = "selective|every_[1-9][0-9]*"


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule."""

    type: str = "adam"
    """``adam`` (AdamW, decoupled weight decay), ``adam_bf16`` (`AdamBF16`: moments in bfloat16, 4
    bytes per parameter instead of 8), ``adam8bit`` (`Adam8bit`: moments in 8 bits, 2.06 bytes),
    ``muon`` (`Muon` for the matrices of the blocks, 4 bytes, and AdamW for the rest) or ``sgd``.
    """
    implementation: str = "auto"
    """Kernels of the update: ``loop`` (several for each parameter), ``foreach`` (several for all)
    or ``fused`` (one).
    ``auto``: ``fused`` for ``adam`` on CUDA, else torch's default. Results of ``fused`` differ by
    rounding. Checkpoints of one load into another. ``fused`` is for ``adam`` and ``muon`` (its
    AdamW) only, and ``adam_bf16`` and ``adam8bit`` have ``foreach`` only.
    """
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.01
    """Weight decay, on every parameter (as AReaL and verl do). Decoupled, except for ``sgd``, which
    adds it to the gradient as torch does.
    """
    beta1: float = 0.9
    """AdamW's first-moment decay."""
    beta2: float = 0.999
    """AdamW's second-moment decay."""
    eps: float = 1e-8
    """AdamW's epsilon. Not 0, because a number without a gradient would become 0 / 0."""
    momentum: float | None = None
    """Momentum of SGD and Muon. Null: 0 for ``sgd``, 0.95 for ``muon``."""
    lr_scheduler_type: str = "constant"
    """``constant``, ``linear`` or ``cosine``, after the warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Null takes ``warmup_steps_proportion``."""
    warmup_steps_proportion: float = 0.001
    """Share of all training steps with linear warm-up, rounded down."""
    min_lr_ratio: float = 0.0
    """Final rate of ``linear`` and ``cosine``, as a share of ``lr``."""
    gradient_clipping: float = 1.0
    """Largest global L2 norm of the gradient. Longer gradients are scaled down."""
    offload: bool = False
    """Keep the optimizer's state in host memory. A step brings it to the GPU in blocks, and changes
    the same bits.
    """

    def __post_init__(self) -> None:
        require_numbers(self, "optimizer.")
        require_choice("optimizer.type", self.type, tuple(_IMPLEMENTATIONS))

        # Adam has all implementations there are, other types some of them.
        known = ("auto", *_IMPLEMENTATIONS["adam"])
        require_choice("optimizer.implementation", self.implementation, known)
        fitting = _IMPLEMENTATIONS[self.type]
        if self.implementation not in ("auto", *fitting):
            raise ConfigError(
                f"config key 'optimizer.implementation' is {self.implementation!r}, but sharded "
                f"parameters have {' or '.join(map(repr, fitting))} for "
                f"optimizer.type {self.type!r}; set it to 'auto', or the type to 'adam'"
            )

        schedules = ("constant", "linear", "cosine")
        require_choice("optimizer.lr_scheduler_type", self.lr_scheduler_type, schedules)
        require_at_least(
            self,
            "optimizer.",
            lr=0.0,
            weight_decay=0.0,
            eps=1e-30,
            warmup_steps=0,
            gradient_clipping=1e-12,
        )
        require_range("optimizer.beta1", self.beta1, low=0.0, high=0.999999)
        require_range("optimizer.beta2", self.beta2, low=0.0, high=0.999999)
        require_range("optimizer.momentum", self.momentum, low=0.0, high=1.0)
        require_range(
            "optimizer.warmup_steps_proportion", self.warmup_steps_proportion, low=0.0, high=1.0
        )
        require_range("optimizer.min_lr_ratio", self.min_lr_ratio, low=0.0, high=1.0)


@dataclass
class MicroBatchSpec:
    """How to cut a rank's share of a batch into micro-batches."""

    n_mbs: int | None = 1
    """Number of micro-batches, or the minimum if ``max_tokens_per_mb`` is set. Null is 1."""
    granularity: int = 1
    """Number of adjacent sequences that stay together: 2 for pairs of a reward model. Must divide
    the batch.
    """
    n_mbs_divisor: int = 1
    """The number of micro-batches is a multiple of this."""
    max_tokens_per_mb: int | None = 8192
    """Most tokens in one micro-batch. Null for no limit. A single longer sequence gets its own
    micro-batch. The gradient does not depend on this, but memory grows with it: activations, tokens
    x tokens if attention uses a mask (``attn_impl`` ``sdpa`` or ``eager``), and the logits with
    their gradient if a loss or model needs whole logits (5 GB for 8192 tokens and 150,000 words in
    bfloat16). c ranks that share a row hold 1/c of its tokens each.
    """
    packing_algorithm: str = "ffd"
    """``ffd`` (first fit decreasing) or ``kk`` (Karmarkar-Karp: better balance, a little slower).
    """

    def __post_init__(self) -> None:
        require_numbers(self, "mb_spec.")
        require_at_least(
            self, "mb_spec.", n_mbs=1, granularity=1, n_mbs_divisor=1, max_tokens_per_mb=1
        )
        require_choice("mb_spec.packing_algorithm", self.packing_algorithm, ("ffd", "kk"))

    def rounded(self, n_mbs: int) -> int:
        """Smallest allowed number of micro-batches that is at least ``n_mbs``."""
        least = max(n_mbs, self.n_mbs or 1)
        # rounded up
        n_multiples = -(-least // self.n_mbs_divisor)
        return n_multiples * self.n_mbs_divisor


@dataclass
class FSDPWrapPolicy:
    """Modules that get their own shard group."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names. None takes the model's ``_no_split_modules``."""


@dataclass
class FSDPConfig:
    """Sharding of the model."""

    wrap_policy: FSDPWrapPolicy = field(default_factory=FSDPWrapPolicy)
    """Shard groups."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a block after its forward (less memory, one more gather)."""
    replicate_size: int = 1
    """Copies of the sharded model (HSDP): each is sharded over the number of ranks divided by this,
    and only gradients travel between copies. It must divide the number of ranks. See
    docs/gpus-and-nodes.md.
    """
    offload_params: bool = False
    """Keep parameters, gradients and optimizer state in host memory. Each block is copied to the
    GPU when it is computed, and the step runs on the CPU. For models that do not fit otherwise,
    because it is slow.
    """
    gradient_sync: str = "auto"
    """Micro-batches that sum gradients over ranks: ``every``, or the ``last`` of a step, which
    saves a reduction in each of the others and takes 4 bytes per trained parameter on every rank.
    ``auto``: ``last`` if that is at most 2 GiB or 5 % of the GPU and ``grad_reduce_dtype`` is
    float32, and always with LoRA.
    """

    forward_prefetch: int = 0
    """Number of blocks whose parameters are gathered ahead in the forward. 0: as FSDP2 does by
    default (one, but later). Each takes memory. For models that run every block in every forward.
    """
    backward_prefetch: int = 0
    """Same in the backward. 0: as FSDP2 does by default (one)."""
    separate_reduce_scatter_group: bool = False
    """Sum gradients in a process group of their own, at the same time as parameters are gathered.
    Not in every torch. Its collectives have torch's time limit instead of ``timeout_s``.
    """

    def __post_init__(self) -> None:
        require_numbers(self, "fsdp.")
        require_at_least(self, "fsdp.", forward_prefetch=0, backward_prefetch=0)
        require_choice("fsdp.gradient_sync", self.gradient_sync, ("auto", "every", "last"))


@dataclass
class RouterReplayConfig:
    """Whose choice of experts a mixture-of-experts model is trained with. The names are verl's."""

    mode: str = "disabled"
    """``disabled``: the routers of the model choose. ``R3`` (rollout routing replay): a token takes
    the experts that the inference server took, from ``routed_experts`` of the batch. See
    docs/rollouts.md.
    """

    def __post_init__(self) -> None:
        if self.mode == "R2":
            raise ConfigError(
                "config key 'router_replay.mode' is 'R2', the choices of the trainer's own "
                "log-probability pass, which are not recorded here; expected 'R3', those of the "
                "inference servers, or 'disabled'"
            )
        require_choice("router_replay.mode", self.mode, ("disabled", "R3"))

    @property
    def is_on(self) -> bool:
        """Whether choices of servers are replayed."""
        return self.mode == "R3"


@dataclass
class ProfileConfig:
    """Traces of some steps, see docs/performance.md."""

    steps: list[int] = field(default_factory=list)
    """Steps to trace: versions of the weights that they train."""
    path: str = "traces"
    """Folder of the traces."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that write a trace."""

    def __post_init__(self) -> None:
        for name in ("steps", "ranks"):
            numbers = getattr(self, name)
            if not numbers or min(numbers) < 0:
                raise ConfigError(
                    f"config key 'profile.{name}' is {list(numbers)}; expected one or more "
                    "numbers that are at least 0"
                )


@dataclass
class TrainEngineConfig:
    """One model, its optimizer, and how both are spread over ranks."""

    experiment_name: str = "experiment"
    """AReaL's name for a group of runs, unused by the engine."""
    trial_name: str = "trial"
    """AReaL's name for one run, unused by the engine."""
    path: str = ""
    """Folder of a Hugging Face model: its config and, unless ``init_from_scratch``, its weights. Or
    a model on the hub (``Qwen/Qwen3-0.6B``), which is downloaded into the cache of huggingface_hub:
    see `find_model_folder`.
    """
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. None takes its main branch."""
    trust_remote_code: bool = False
    """Run the Python code in the model's folder. Only needed for architectures that transformers
    does not know.
    """
    init_from_scratch: bool = False
    """Take only the config from ``path`` and draw the weights from ``seed``."""
    seed: int = 1
    """Seed of weights drawn from scratch and of a new critic head. The same result at every world
    size.
    """
    is_critic: bool = False
    """Replace the language-model head by a value head (one output per token)."""
    train_vision: bool = False
    """Train a model that sees: text and images in, text out (``AutoModelForImageTextToText``).
    Batches then hold images in ``multi_modal_input``, see docs/vision.md. False: only text, and
    models without a text-only form are refused.
    """
    freeze_vision_tower: bool = False
    """With ``train_vision``: do not change the vision tower. Its projection to the language model
    stays trained if it is outside of the tower (Gemma 3, InternVL, LLaVA).
    """
    dtype: str = "bfloat16"
    """Compute dtype. Parameters and gradients are always float32, and ``optimizer.type`` says what
    the state is.
    """
    device: str = "auto"
    """``cpu``, ``cuda``, or ``auto``: CUDA if torch sees a device and the default process group, if
    it already exists, has nccl (else a warning). A rank uses the only device it sees, or the one
    with index LOCAL_RANK. The job does not start if a rank has no device or two ranks share one.
    """
    grad_reduce_dtype: str = "float32"
    """Dtype in which gradients are summed over ranks."""
    attn_impl: str | None = None
    """None: packed sequences attend each within itself (``holdfast``: no mask, no work for pairs of
    tokens from two sequences) if the architecture supports it, else the default of transformers
    (``sdpa`` or ``eager``). ``holdfast``: refuse a model that does not support it. Or an attention
    of transformers: ``sdpa``, ``eager``, ``flash_attention_2`` ...
    """
    gradient_checkpointing: bool | str = False
    """Recompute blocks in the backward instead of keeping their activations: ``true`` all,
    ``every_2`` (3, ...) every second (third, ...) block. ``selective``: keep results of attention
    and matrix products, and recompute the rest.
    """
    compile: bool = False
    """Compile each block, and the passes over logits, with torch.compile, which needs a C++
    compiler on CPUs. The first steps take longer. Results differ by rounding, checkpoints do not.
    """
    router_aux_loss_coef: float | None = None
    """For mixture-of-experts models: weight of the load-balancing loss of transformers (that of
    Mixtral), which is added to the gradient, but not to the reported loss. See `Routers.loss`.
    Null: none, whatever the model's ``config.json`` says. RL of a trained model usually needs none,
    pretraining takes 0.001 to 0.01.
    """
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    """For mixture-of-experts models that are trained on rollouts: replay the experts that the
    inference servers chose.
    """
    disable_dropout: bool = True
    """Set every dropout probability to zero. RL needs log-probabilities that repeat. Ranks that
    share rows need it.
    """
    temperature: float = 1.0
    """Divisor of the logits before log-probabilities, as in the sampler."""
    logprobs_chunk_size: int | None = None
    """Tokens whose log-probabilities and entropy are computed at a time. Null takes as many as fit
    in 128 MiB.
    """
    max_model_len: int | None = None
    """Most tokens of a sequence, prompt and answer: the ``--max-model-len`` of the inference
    servers. A batch with a longer sequence is refused. As in vLLM, LongRoPE models (Phi-3 and
    Phi-4-mini with long contexts) use their long factors if it exceeds their
    ``original_max_position_embeddings``, else the short ones. Models of ``rope_type: dynamic`` are
    scaled if it exceeds their ``max_position_embeddings``. Null: these lengths for such models, and
    no limit for others.
    """
    pack_sequences: bool = True
    """Pack each micro-batch into one row. False pads it, for models that do not support packing."""
    pad_to_maximum: bool = False
    """Fill every packed row up to ``mb_spec.max_tokens_per_mb`` with tokens that do not count. The
    GPU allocator then sees only one shape, and each step takes as long as a full one.
    """
    enable_tree_training: bool = False
    """Compute the prompt of several answers once for each micro-batch. Loss and gradients differ by
    rounding. For models with our attention, without dropout. See docs/algorithms.md. Mini-batches
    of `PPOActor` and `PPOCritic` then hold whole groups.
    """
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """Micro-batching."""
    optimizer: OptimizerConfig | None = field(default_factory=OptimizerConfig)
    """None for an engine that only evaluates (a reference model)."""
    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    """Sharding."""
    backend: str = "fsdp"
    """The mesh in AReaL's notation: ``fsdp`` for any number of ranks, ``fsdp:d8`` for exactly 8.
    ``fsdp:c2``: every two ranks get the same data and share the tokens of each packed row
    (``fsdp:d4c2``: 8 ranks). ``fsdp:d4t2``: they share matrices. ``fsdp:d8e4``: 4 ranks each share
    the experts. See `ParallelStrategy.from_backend` and docs/gpus-and-nodes.md.
    """
    use_lora: bool = False
    """Train LoRA adapters instead of the weights, which stay frozen in their dtype in ``path``.
    Needs peft (``pip install 'holdfast[lora]'``). See docs/lora.md.
    """
    lora_rank: int = 32
    """Rank of the adapters, which are float32."""
    lora_alpha: int = 16
    """Adapters are scaled by ``lora_alpha / lora_rank``."""
    target_modules: list[str] = field(default_factory=list)
    """Last parts of the names of the linear layers that get adapters (``q_proj``). Empty, or with
    ``all-linear``: all except the head.
    """
    peft_type: str = "lora"
    """``lora``, the only supported kind of adapter."""
    timeout_s: float = 600.0
    """Longest wait for a peer in any collective."""
    profile: ProfileConfig | None = None
    """Write traces of some steps with torch.profiler. Null: none. Only one engine of a process can.
    """

    def __post_init__(self) -> None:
        require_numbers(self)
        self.dtype = _DTYPE_ALIASES.get(self.dtype, self.dtype)
        self.grad_reduce_dtype = _DTYPE_ALIASES.get(self.grad_reduce_dtype, self.grad_reduce_dtype)
        require_choice("dtype", self.dtype, DTYPES)
        require_choice("device", self.device, ("auto", "cpu", "cuda"))

        # Keys that need another key.
        if self.attn_impl == PACKED_ATTENTION and not self.pack_sequences:
            raise ConfigError(
                f"config key 'attn_impl' is {PACKED_ATTENTION!r}, which is for packed sequences, "
                "but 'pack_sequences' is false; set it to true, or 'attn_impl' to null"
            )
        if self.train_vision and not self.pack_sequences:
            raise ConfigError(
                "config keys 'train_vision' is true and 'pack_sequences' false, but images are "
                "only supported in packed rows; set 'pack_sequences' to true"
            )
        # Without vision there is no tower, so the key would do nothing.
        if self.freeze_vision_tower and not self.train_vision:
            raise ConfigError(
                "config key 'freeze_vision_tower' is true, but 'train_vision' is false; set that "
                "to true, or leave this out"
            )

        if self.enable_tree_training:
            self._require_shareable()
        if self.router_replay.is_on:
            self._require_replayable()

        # A text is a way to recompute, true and false are all or none.
        choice = self.gradient_checkpointing
        known = not isinstance(choice, str) or re.fullmatch(_CHECKPOINTINGS, choice)
        if not known:
            raise ConfigError(
                f"config key 'gradient_checkpointing' is {choice!r}; expected true, false, "
                "'selective', or 'every_2' (or another number)"
            )
        if self.compile and choice == "selective":
            raise ConfigError(
                "config key 'compile' is True, but the operators that gradient_checkpointing "
                "'selective' keeps are not seen in compiled blocks; set it to true, false or "
                "'every_2'"
            )

        require_choice("grad_reduce_dtype", self.grad_reduce_dtype, DTYPES)
        require_at_least(
            self,
            temperature=1e-6,
            router_aux_loss_coef=0.0,
            logprobs_chunk_size=1,
            max_model_len=1,
            timeout_s=1e-3,
            lora_rank=1,
            lora_alpha=1,
        )
        if self.use_lora:
            require_choice("peft_type", self.peft_type, ("lora",))

        unmet = None
        if not self.pack_sequences:
            unmet = "pack_sequences' is False"
        elif self.mb_spec.max_tokens_per_mb is None:
            unmet = "mb_spec.max_tokens_per_mb' is null"
        # Rows have a maximum only if they are packed and the tokens are limited.
        if self.pad_to_maximum and unmet:
            raise ConfigError(
                f"config key 'pad_to_maximum' is True, but '{unmet}: packed rows are filled up to "
                "max_tokens_per_mb; set that, or leave this out"
            )

        # Each of the two moves the optimizer's state to the host.
        if self.fsdp.offload_params and self._optimizer_is_offloaded:
            raise ConfigError(
                "config keys 'fsdp.offload_params' and 'optimizer.offload' are both true, but the "
                "first already keeps the optimizer's state in host memory and steps there; leave "
                "out one of them"
            )
        _ = self.parallel_strategy  # raises if it cannot be

    def _require_shareable(self) -> None:
        # Prompts are shared in packed rows of text, and with them what dropout would draw.
        if not self.pack_sequences:
            other = "'pack_sequences' is false"
        elif self.train_vision:
            other = "'train_vision' is true"
        elif not self.disable_dropout:
            other = "'disable_dropout' is false"
        else:
            return
        raise ConfigError(
            f"config key 'enable_tree_training' is true, but {other}: only prompts of text, in "
            "packed rows and without dropout, are computed once; change one of them"
        )

    def _require_replayable(self) -> None:
        # Only the policy, on text, is sampled by servers that say their choices.
        if self.is_critic:
            other = "'is_critic' is true: a critic"
        elif self.optimizer is None:
            other = "'optimizer' is null: a reference or teacher"
        elif self.train_vision:
            other = "'train_vision' is true: a model that takes images"
        else:
            return
        raise ConfigError(
            f"config key 'router_replay.mode' is 'R3', but {other} routes its tokens itself; set "
            "the mode to 'disabled'"
        )

    @property
    def parallel_strategy(self) -> ParallelStrategy:
        """The mesh that ``backend`` and ``fsdp.replicate_size`` describe."""
        return ParallelStrategy.from_backend(self.backend, self.fsdp.replicate_size)

    def mesh_of(self, argument: ParallelStrategy | None) -> ParallelStrategy:
        """The mesh of ``create_process_group(argument)``. Raises ConfigError if the config has
        another one.
        """
        # An argument may leave the number of data ranks open.
        own = self.parallel_strategy
        if argument is None or argument == replace(own, data_parallel_size=None):
            return own

        # The config may say the same, nothing, or the same for any number of ranks.
        any_number = replace(argument, data_parallel_size=None)
        if own not in (argument, ParallelStrategy(), any_number):
            raise ConfigError(
                f"create_process_group was given {argument.sizes}, but config keys 'backend' and "
                f"'fsdp.replicate_size' say {own.sizes}; leave out the argument, or set backend "
                "to 'fsdp' and replicate_size to 1"
            )
        return argument

    @property
    def parts_on_host(self) -> tuple[str, ...]:
        """The tags of `FSDPEngine.offload` that are always in host memory."""
        if self.fsdp.offload_params:
            return ("weights", "optimizer")
        if self._optimizer_is_offloaded:
            return ("optimizer",)
        return ()

    @property
    def row_tokens(self) -> int:
        """Token count to which packed rows are filled up. 0: no filling."""
        if not self.pad_to_maximum:
            return 0
        return self.mb_spec.max_tokens_per_mb or 0

    @property
    def _optimizer_is_offloaded(self) -> bool:
        return self.optimizer is not None and self.optimizer.offload
