"""`ParallelStrategy`: how many ranks share what, under AReaL's names and in its notation
(``fsdp:d8``).
"""

import re
from dataclasses import dataclass, fields, replace
from math import lcm, prod

from ..utils.config import require_numbers, require_range
from ..utils.errors import ConfigError

_BACKEND = re.compile(r"(?:fsdp|megatron|archon)(?:\[[^\[\]]*\])?(?::(?P<sizes>.+))?")
_BY_PART = re.compile(r"\(attn:(?P<attention>[^|]+)\|ffn:(?P<experts>[^|]+)\)")
_SIZE = re.compile(r"([dptce])([1-9][0-9]*)")


@dataclass(frozen=True)
class ParallelStrategy:
    """Number of ranks along each dimension of the mesh. The world has d c t ranks.

        # HSDP: two copies, each sharded over 8 ranks
        ParallelStrategy(data_parallel_size=16, replicate_size=2)
        ParallelStrategy.from_backend("fsdp:d16", replicate_size=2)  # the same

    Attributes:
        data_parallel_size: d, ranks with different data. None: as many as the other dimensions
            leave.
        context_parallel_size: c, ranks that share the tokens of a row.
        tensor_parallel_size: t, ranks that share matrices.
        expert_parallel_size: e, ranks of one replica that share the experts.
        replicate_size: r, copies of the sharded model. It divides d. Not in AReaL.
        pipeline_parallel_size: only 1.
        expert_tensor_parallel_size: only 1.

    Raises:
        ConfigError: the sizes do not fit together.
    """

    data_parallel_size: int | None = None
    context_parallel_size: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    replicate_size: int = 1
    pipeline_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        require_numbers(self)
        for field in fields(self):
            require_range(field.name, getattr(self, field.name), low=1)
        for name in ("pipeline_parallel_size", "expert_tensor_parallel_size"):
            size = getattr(self, name)
            if size > 1:
                raise ConfigError(
                    f"{name} is {size}; expected 1, because FSDP2 shards every layer over the ranks"
                )
        if self.expert_parallel_size > 1 and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"expert_parallel_size is {self.expert_parallel_size} and tensor_parallel_size "
                f"{self.tensor_parallel_size}, which are not supported together; set config key "
                "'backend' with one of 'e' and 't'"
            )
        if self.data_parallel_size is None:
            return

        # The copies and their experts must divide the ranks.
        d = self.data_parallel_size
        r = self.replicate_size
        if d % r:
            raise ConfigError(
                f"replicate_size (config key 'fsdp.replicate_size') is {r}, with {d} "
                f"data-parallel ranks; expected one of {divisors(d)}"
            )
        e = self.expert_parallel_size
        replica = d // r * self.ranks_with_same_data
        if replica % e:
            raise ConfigError(
                f"expert_parallel_size is {e}, with {replica} ranks in a replica; expected one of "
                f"{divisors(replica)}"
            )

    @classmethod
    def from_backend(cls, backend: str, replicate_size: int = 1) -> "ParallelStrategy":
        """Parse AReaL's notation: an engine, then the sizes of dimensions in any order.

        Examples: ``fsdp``, ``fsdp:d8``, ``fsdp[actor]:d4t2c2``. ``megatron:`` and ``archon:`` are
        read like ``fsdp:``, ``megatron:(attn:d2c4|ffn:d1e8)`` as ``d2c4e8``. Without d it follows
        from the number of ranks.

        Raises:
            ConfigError: the notation is not understood, or the mesh has a pipeline, or see above.
        """
        found = f"config key 'backend' is {backend!r}"
        match = _BACKEND.fullmatch(backend) if isinstance(backend, str) else None
        if match is None:
            raise ConfigError(
                f"{found}; expected fsdp, megatron or archon, with sizes as in 'fsdp:d8'"
            )

        # The sizes are for the whole model, or apart for attention and experts.
        text = match["sizes"] or ""
        by_part = _BY_PART.fullmatch(text)
        if by_part is None:
            sizes = _sizes_of(text, "dptce", found)
            experts = {}
        else:
            sizes = _sizes_of(by_part["attention"], "dptc", found)
            experts = _sizes_of(by_part["experts"], "dpte", found)
            ranks = prod(sizes.values())
            others = prod(experts.values())
            if ranks != others:
                raise ConfigError(
                    f"{found}, with {ranks} ranks for attention and {others} for experts; "
                    "expected as many"
                )

        # Dimensions that FSDP2 replaces are named in the error, with what to set instead.
        has_pipeline = max(sizes.get("p", 1), experts.get("p", 1)) > 1
        if has_pipeline or experts.get("t", 1) > 1:
            kind = "pipeline" if has_pipeline else "expert tensor"
            instead = "fsdp"
            if "d" in sizes:
                n_ranks = prod(sizes.get(name, 1) for name in "dptc")
                instead = f"fsdp:d{n_ranks}"
            raise ConfigError(
                f"{found}, with {kind} parallelism, which is not supported; set config key "
                f"'backend' to {instead!r}: FSDP2 alone then shards the model over the same ranks"
            )
        e = sizes.get("e") or experts.get("e", 1)
        return cls(
            sizes.get("d"), sizes.get("c", 1), sizes.get("t", 1), e, replicate_size=replicate_size
        )

    def for_world(self, world_size: int) -> "ParallelStrategy":
        """Fill in ``data_parallel_size``. Raises ConfigError if the strategy is for another number
        of ranks.
        """
        # Without d, every rank that the other dimensions leave has its own data.
        per_data_rank = self.ranks_with_same_data
        d = self.data_parallel_size or max(1, world_size // per_data_rank)
        if self.data_parallel_size is None and world_size < per_data_rank:
            raise ConfigError(
                f"{per_data_rank} ranks have the same data (context parallelism "
                f"{self.context_parallel_size}, tensor parallelism {self.tensor_parallel_size}), "
                f"but only {world_size} rank(s) have joined; start {per_data_rank} ranks or a "
                f"multiple, or set config key 'backend' to 'fsdp:d{world_size}'"
            )
        needed = d * per_data_rank
        if needed != world_size:
            each = f" ({per_data_rank} for each data rank)" if per_data_rank > 1 else ""
            raise ConfigError(
                f"data_parallel_size is {d}, but {world_size} rank(s) have joined; start {needed} "
                f"ranks{each}, or set config key 'backend' to 'fsdp:d{world_size}', or to 'fsdp' "
                "for any number"
            )
        return replace(self, data_parallel_size=d)

    @property
    def ranks_with_same_data(self) -> int:
        """Number of ranks with the same data, c t. They are consecutive, and the first is their
        head.
        """
        return self.cp_size * self.tp_size

    @property
    def multiple_of(self) -> int:
        """The number of ranks must be a multiple of this if ``data_parallel_size`` is None: r lcm(c
        t, e).
        """
        return self.replicate_size * lcm(self.ranks_with_same_data, self.ep_size)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes d, r, c, t and e under these names. Without ``data_parallel_size`` there is no
        d.
        """
        sizes = {}
        if self.data_parallel_size is not None:
            sizes["d"] = self.data_parallel_size
        sizes["r"] = self.replicate_size
        sizes["c"] = self.cp_size
        sizes["t"] = self.tp_size
        sizes["e"] = self.ep_size
        return sizes

    @property
    def dp_size(self) -> int | None:
        """``data_parallel_size``."""
        return self.data_parallel_size

    @property
    def cp_size(self) -> int:
        """``context_parallel_size``."""
        return self.context_parallel_size

    @property
    def tp_size(self) -> int:
        """``tensor_parallel_size``."""
        return self.tensor_parallel_size

    @property
    def ep_size(self) -> int:
        """``expert_parallel_size``."""
        return self.expert_parallel_size

    @property
    def pp_size(self) -> int:
        """``pipeline_parallel_size``."""
        return self.pipeline_parallel_size

    @property
    def world_size(self) -> int:
        """Number of ranks. Raises ConfigError if ``data_parallel_size`` is None."""
        if self.data_parallel_size is None:
            raise ConfigError(
                "data_parallel_size is None, so any number of ranks may fit; see `for_world`"
            )
        return self.data_parallel_size * self.ranks_with_same_data


def _sizes_of(text: str, known: str, found: str) -> dict[str, int]:
    # Whatever is left of the text without its sizes was not understood.
    pairs = _SIZE.findall(text)
    sizes = {name: int(size) for name, size in pairs}
    repeated = len(sizes) < len(pairs)
    unknown = sizes.keys() - set(known)
    if _SIZE.sub("", text) or repeated or unknown:
        raise ConfigError(
            f"{found}; expected each of {', '.join(known)} at most once in {text!r}, with a size "
            "from 1"
        )
    return sizes


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
