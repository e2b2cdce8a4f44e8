"""A server of ``transformers serve`` that is told to load published weights: for trying things out.

The server says nothing of what it serves, and tells no log-probabilities, so neither label nor contents can be checked.
Each request names the model that is to answer it: name the published folder.
"""

import os
from dataclasses import dataclass

from ...utils.logging import get_logger
from .http import HTTPServer

logger = get_logger(__name__)


@dataclass(eq=False, repr=False)
class TransformersServer(HTTPServer):
    """A client of one server: an `InferenceServer`, whose word is taken for what it serves; picklable.

    Attributes:
        url: of the server, ``http://host:port``; a user and password in it are sent, and shown nowhere.
        timeout_s: longest time that one update may take.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._told_unchecked = False

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Have the server forget its models and load the published folder ``path``; returns ``version``.

        Raises:
            UnreachableServerError: it could not be reached, or the connection broke.
            SlowServerError: it did not finish within ``timeout_s``.
            PublishError: it failed to load.
        """
        if not self._told_unchecked:
            self._told_unchecked = True
            logger.warning("%s tells no log-probabilities; what it serves cannot be checked", self.name)
        with self._update(path, version) as calls:
            calls.post("reset", "/reset")
            events = calls.events("load", "/load_model", {"model": os.fspath(path)})
            if not events or events[-1].get("status") != "ready":
                raise calls.refuse(f"the load ended with {events[-1:]}; expected the status 'ready'")
        return version
