"""verl's keys for the mismatch between sampler and trainer, in terms of `RejectionSamplingConfig`.

verl (``algorithm.rollout_correction``) weighs tokens by ``rollout_is`` and rejects them by ``rollout_rs``, each from
the ratio of the trainer's probability to the sampler's.
"""

from ...utils.config import require_choice
from ...utils.errors import ConfigError
from .off_policy import RejectionSamplingConfig

_METRICS = {"k1": "ratio", "k2": "kl_k2", "k3": "kl_k3_behave"}
_LEVELS = {"token": ("token", "mean"), "seq_sum": ("sequence", "sum"), "seq_mean": ("sequence", "mean")}
ROLLOUT_RS = {
    f"{level}_{k}": (*found, metric)
    for level, found in (_LEVELS | {"seq_max": ("sequence", "max")}).items()
    for k, metric in _METRICS.items()
    if (level, k) != ("seq_max", "k1")
}
"""Name in ``rollout_rs`` -> level, agg and metric."""
_WEIGHTS = {None: "one", "token": "token", "sequence": "sequence_product"}


def rejection_from_rollout_keys(
    rollout_is: str | None,
    rollout_is_threshold: float,
    rollout_rs: str | None,
    rollout_rs_threshold: str | float | None,
) -> RejectionSamplingConfig | None:
    """What verl's keys ask for; None when neither ``rollout_is`` nor ``rollout_rs`` is set.

    ``rollout_rs_threshold`` is an upper bound, or ``lower_upper``; with ``k1`` of the ratio's inverse, where a single
    number t stands for ``1/t_t``.

    Raises:
        ConfigError: an unknown name, several at once, or a threshold that is missing or no number.
    """
    require_choice("rollout_is", rollout_is, (None, "token", "sequence"))
    weight = _WEIGHTS[rollout_is]
    upper = None if rollout_is is None else rollout_is_threshold
    if rollout_rs is None and rollout_rs_threshold is not None:
        raise ConfigError(f"config key 'rollout_rs_threshold' is {rollout_rs_threshold!r}, but 'rollout_rs' is null")
    if rollout_rs is None and upper is None:
        return None
    if upper is not None and not upper > 0:
        raise ConfigError(f"config key 'rollout_is_threshold' is {upper}; expected more than 0")
    if rollout_rs is None:  # nothing is rejected, weights are limited
        return RejectionSamplingConfig(upper=float("inf"), weight=weight, weight_upper=upper)
    if rollout_rs not in ROLLOUT_RS:
        raise ConfigError(f"config key 'rollout_rs' is {rollout_rs!r}; expected one of {', '.join(ROLLOUT_RS)}")
    level, agg, metric = ROLLOUT_RS[rollout_rs]
    low, high = _bounds(rollout_rs_threshold, metric)
    return RejectionSamplingConfig(level, "mask", metric, agg, high, low, weight, upper)


def _bounds(threshold: str | float | None, metric: str) -> tuple[float | None, float]:
    lower, _, upper = str(threshold).rpartition("_")
    try:
        low, high = float(lower or "nan"), float(upper)
    except ValueError:
        raise _bad_threshold(threshold) from None
    if not high > 0 or (lower and not low > 0) or (lower and metric != "ratio"):
        raise _bad_threshold(threshold)
    if metric != "ratio":
        return None, high
    if not lower and high <= 1:
        raise _bad_threshold(threshold)
    return (1.0 / high, 1.0 / low) if lower else (1.0 / high, high)  # verl's k1 is -log r


def _bad_threshold(threshold: object) -> ConfigError:
    return ConfigError(
        f"config key 'rollout_rs_threshold' is {threshold!r}; expected a number above 0, or, with k1, one "
        "above 1 or 'lower_upper', with a point in both (0.5_2.0; YAML reads 0.5_2 as 0.52)"
    )
