"""`ServerConnection`: what an engine publishes to, and how."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...utils.distributed import all_ranks_succeed, rank_zero_decides
from ...utils.errors import ConfigError
from ...utils.timing import timed
from ..api import InferenceServer, WeightUpdateMeta
from .fleet import ServerFleet
from .probe import PROBE_NAME, probe_weights
from .publish import PublishedWeights, open_fleet, publish_weights

if TYPE_CHECKING:
    from ..fsdp_engine import FSDPEngine


class ServerConnection:
    """The servers of an engine; none at first.

    Of servers that were named one by one it makes a `ServerFleet`, which ends with the connection. A fleet that was
    given is its maker's.
    """

    def __init__(self) -> None:
        self._servers: Sequence[InferenceServer] | ServerFleet = ()
        self._own: ServerFleet | None = None
        self._meta: WeightUpdateMeta | None = None

    def connect(self, servers: Sequence[InferenceServer] | ServerFleet, meta: WeightUpdateMeta) -> None:
        """Publish to ``servers`` from now on, as ``meta`` says."""
        self.close()
        self._servers, self._meta = servers, meta

    def publish(self, engine: "FSDPEngine", meta: WeightUpdateMeta | None) -> PublishedWeights:
        """`publish_weights` of the engine's weights, as ``meta`` says, or what `connect` was given.

        A `WeightsProbe` of them goes along where a server may look at it: one forward, before any server is told.
        """
        meta = meta or self._meta
        if meta is None:
            raise ConfigError("update_weights has no WeightUpdateMeta; pass one or call connect_engine first")
        group, version = engine.control_group, engine.get_version() if meta.version is None else meta.version
        with all_ranks_succeed("connecting the inference servers", group):
            fleet = self._own or open_fleet(self._servers, group)
        self._own = None if fleet is self._servers else fleet
        seconds: dict[str, float] = {}
        with timed(seconds, "probe"):
            probe = probe_weights(engine) if rank_zero_decides(fleet.may_check_content, group) else None
        extra = {} if probe is None else {PROBE_NAME: probe.encode()}
        done = publish_weights(
            engine.model, meta, version, fleet, group, str(engine.model_folder), engine.base_dtype, extra
        )
        total_s = seconds["probe"] + done.seconds["total"]
        return replace(done, seconds={**seconds, **done.seconds, "total": total_s})

    def close(self) -> None:
        """Forget the servers; nobody looks after them any more, unless they are a fleet of the user's."""
        if self._own is not None:
            self._own.close()
        self._servers, self._own = (), None
