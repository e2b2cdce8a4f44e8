"""`AdaptedServer`: what the clients of servers that take LoRA adapters share; `adapters` says why nothing is paused."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

from ...utils.errors import ServerError, SlowServerError
from ...utils.logging import get_logger
from .adapters import AdapterFacts, AdaptersInUse, adapter_label, adapter_name, read_facts
from .api import ServerStatus, weights_label
from .checked import CheckedServer
from .http import Calls

logger = get_logger(__name__)

_NO_ROOM = (
    "if it waits for requests of older versions to end, let it compute with more versions at a time (--max-loras of "
    "vLLM, --max-loras-per-batch of SGLang)"
)


@dataclass(eq=False, repr=False)
class AdaptedServer(CheckedServer, ABC):
    """A client of a server that serves adapters beside the base model that it was started with: an `AdapterServer`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._adapters = AdaptersInUse()

    def update_adapters_from_disk(self, path: str, version: int) -> int:
        """Have new requests answered by the base with the adapters in ``path``, and see that they are; returns
        ``version``.

        One update is look, load, read back, compare contents, and unload what no request uses any more. Requests in
        flight end on the adapters that they began with. After any error the server goes on as before.

        Raises:
            UnreachableServerError: it could not be reached, or the connection broke.
            SlowServerError: it did not finish within ``timeout_s``.
            WrongContentError: it answers by other adapters, or on another base; they were unloaded again.
            PublishError: it takes no adapters, or not these; it is paused; or its base is not the one that it was
                started with.
        """
        label, probe = weights_label(path, version), self._read_probe(path)
        name = adapter_name(label)
        with self._update(path, version) as calls:
            self._require_base(calls)
            self._require_room(calls, read_facts(path))
            if name not in self._loaded_adapters(calls):
                self._load_adapter(calls, name, os.fspath(path))
                if name not in (loaded := self._loaded_adapters(calls)):
                    raise calls.refuse(f"after it, the server lists the adapters {loaded}; expected {name}")
            try:
                self._check_content(calls, path, probe, name)
            except SlowServerError as error:
                raise SlowServerError(f"{error}; {_NO_ROOM}") from error
            self._adapters.switch(name, os.fspath(path))
            self._retire(calls)
        return version

    def folders_in_use(self) -> set[str]:
        """Folders of the adapters that requests use, or that new ones would: the server may read them again."""
        return self._adapters.folders()

    def status(self) -> ServerStatus:
        """What the server says that it serves: of adapters, whether it has those that this client told it of.

        Raises:
            ServerError: it could not be reached, or did not answer as expected.
        """
        with self._calls("", self.status_timeout_s, ServerError) as calls:
            status, name = self._status(calls), self._adapters.current
            if status.label is None and name is not None and name in self._loaded_adapters(calls):
                return replace(status, label=adapter_label(name))
            return status

    def _require_base(self, calls: Calls) -> None:
        status = self._status(calls)
        if status.label is not None:
            raise calls.refuse(
                f"its base model was replaced by the published weights {status.label}, and adapters belong on the one "
                "before: restart it with the base model"
            )
        if status.paused:
            raise calls.refuse(
                "it is paused, which no update of adapters does: whoever paused it may have left its weights in "
                "pieces; resume it by hand, or restart it"
            )

    def _leave_adapters(self, calls: Calls) -> None:
        """Have new requests answered by the weights that the server has just loaded."""
        if self._adapters.current is not None:
            self._adapters.switch(None)
            self._retire(calls)

    def _retire(self, calls: Calls) -> None:
        """Unload published adapters that no request uses; what cannot be is left for the next time."""
        try:
            for name in self._adapters.idle(self._loaded_adapters(calls)):
                self._unload_adapter(calls, name)
        except ServerError as error:
            logger.warning("%s", error)

    @abstractmethod
    def _require_room(self, calls: Calls, facts: AdapterFacts) -> None:
        """Raise PublishError if the server, as it was started, does not take such adapters."""

    @abstractmethod
    def _status(self, calls: Calls) -> ServerStatus:
        """What the server says of its base."""

    @abstractmethod
    def _loaded_adapters(self, calls: Calls) -> list[str]:
        """Names of the adapters that the server has."""

    @abstractmethod
    def _load_adapter(self, calls: Calls, name: str, path: str) -> None:
        """Have it load one more; raises PublishError when it refuses, and changes nothing then."""

    @abstractmethod
    def _unload_adapter(self, calls: Calls, name: str) -> None:
        """Have it forget one that no request uses."""


def listed_adapters(models: dict[str, Any]) -> list[str]:
    """Names in the answer of ``GET /v1/models`` that are not of a base model."""
    return [card["id"] for card in models["data"] if card.get("parent") is not None]
