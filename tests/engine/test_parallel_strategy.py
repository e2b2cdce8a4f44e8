"""`ParallelStrategy`: AReaL's notation, sizes that fit together, and the errors for those that do
not.
"""

from typing import Any

import pytest

from holdfast.engine import FSDPConfig, ParallelStrategy, TrainEngineConfig
from holdfast.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "sizes"),
    [
        ("fsdp", {"r": 1, "c": 1, "t": 1, "e": 1}),
        ("fsdp:d8", {"d": 8, "r": 1, "c": 1, "t": 1, "e": 1}),
        ("fsdp:d4t2c2", {"d": 4, "r": 1, "c": 2, "t": 2, "e": 1}),
        ("fsdp[actor]:c2d4p1", {"d": 4, "r": 1, "c": 2, "t": 1, "e": 1}),
        ("archon:d8e8", {"d": 8, "r": 1, "c": 1, "t": 1, "e": 8}),
        ("megatron:(attn:d2c4|ffn:d1e8)", {"d": 2, "r": 1, "c": 4, "t": 1, "e": 8}),
        ("megatron:(attn:d4p1c2|ffn:d1p1t1e8)", {"d": 4, "r": 1, "c": 2, "t": 1, "e": 8}),
        ("fsdp:t2", {"r": 1, "c": 1, "t": 2, "e": 1}),
    ],
)
def test_areals_notation_is_parsed(backend: str, sizes: dict[str, int]) -> None:
    strategy = ParallelStrategy.from_backend(backend)
    assert strategy.sizes == sizes
    if "d" in sizes:
        assert strategy.world_size == sizes["d"] * sizes["c"] * sizes["t"]
        assert strategy.for_world(strategy.world_size) == strategy


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("fsdp:", "'fsdp:'; expected fsdp, megatron or archon, with sizes as in 'fsdp:d8'"),
        ("deepspeed:d8", "expected fsdp, megatron or archon"),
        ("fsdp:d4d2", "expected each of d, p, t, c, e at most once in 'd4d2'"),
        ("fsdp:d0", "with a size from 1"),
        ("fsdp:d4x2", "at most once in 'd4x2'"),
        ("fsdp:(attn:d4|ffn:d2c2)", "expected each of d, p, t, e at most once in 'd2c2'"),
        ("fsdp:(attn:d4|ffn:d1e8)", "with 4 ranks for attention and 8 for experts"),
        ("megatron:d2p2t1", "'megatron:d2p2t1', with pipeline parallelism, .* to 'fsdp:d4'"),
        ("megatron:(attn:d4p2t2|ffn:d2p2t1e4)", "with pipeline parallelism, .* to 'fsdp:d16'"),
        ("megatron:(attn:d4|ffn:d2t2)", "with expert tensor parallelism, .* to 'fsdp:d4'"),
        ("fsdp:p2", "with pipeline parallelism, .* to 'fsdp'"),
        (
            "fsdp:d4e3",
            "expert_parallel_size is 3, with 4 ranks in a replica; expected one of \\[1, 2, 4\\]",
        ),
        ("fsdp:d4t2e1", None),
        (
            "fsdp:d6e4",
            (
                "expert_parallel_size is 4, with 6 ranks in a replica; expected one of \\[1, 2, "
                "3, 6\\]"
            ),
        ),
    ],
)
def test_a_backend_that_does_not_fit_says_what_would(backend: str, message: str | None) -> None:
    if message is None:
        assert ParallelStrategy.from_backend(backend).ep_size == 1
        return
    with pytest.raises(ConfigError, match=message):
        ParallelStrategy.from_backend(backend)


def test_sizes_are_checked_against_each_other_and_the_world() -> None:
    strategy = ParallelStrategy(tensor_parallel_size=2, context_parallel_size=2, replicate_size=2)
    assert strategy.for_world(16).sizes == {"d": 4, "r": 2, "c": 2, "t": 2, "e": 1}
    assert (strategy.dp_size, strategy.cp_size, strategy.tp_size, strategy.pp_size) == (
        None,
        2,
        2,
        1,
    )
    assert strategy.ranks_with_same_data == 4
    for world_size, message in (
        (6, "data_parallel_size is 1, but 6 rank"),
        (12, "replicate_size.* is 2, with 3 data-parallel ranks; expected one of \\[1, 3\\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            strategy.for_world(world_size)
    with pytest.raises(ConfigError, match="data_parallel_size is None"):
        _ = strategy.world_size
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"data_parallel_size": 0}, "'data_parallel_size' is 0"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; expected 1"),
        ({"data_parallel_size": 8, "replicate_size": 3}, r"expected one of \[1, 2, 4, 8\]"),
    ]
    for sizes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ParallelStrategy(**sizes)


def test_a_config_with_an_unsupported_mesh_is_refused_before_anything_starts() -> None:
    for backend, message in (
        (
            "fsdp:d4p2",
            (
                "'backend' is 'fsdp:d4p2', with pipeline parallelism, which is not supported; .* "
                "'fsdp:d8'"
            ),
        ),
        (
            "fsdp:d4t2e4",
            (
                "size is 4 and tensor_parallel_size 2, which are not supported together; .* "
                "'backend' with"
            ),
        ),
        (
            "fsdp:t2e2",
            (
                "size is 2 and tensor_parallel_size 2, which are not supported together; .* "
                "'backend' with"
            ),
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainEngineConfig(backend=backend)
    with pytest.raises(ConfigError, match="'replicate_size' is 0"):
        TrainEngineConfig(fsdp=FSDPConfig(replicate_size=0))
    config = TrainEngineConfig(backend="fsdp:d8", fsdp=FSDPConfig(replicate_size=2))
    assert config.parallel_strategy == ParallelStrategy(data_parallel_size=8, replicate_size=2)
