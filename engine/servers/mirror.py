"""The mirror of a server: a `holdfast-weights mirror` on its host, which makes the folders that the
server loads.
"""

import os

from .http import Calls

MIRROR_TOKEN = "HOLDFAST_WEIGHTS_TOKEN"
"""Environment variable with the token that a mirror asks for."""

_NOT_PREPARED = "the server was not told, and goes on with the weights it has"


def prepared_folder(calls: Calls, mirror: str | None, path: str, version: int, label: str) -> str:
    """The folder that the server loads. The mirror at this URL first makes it, while the server
    answers requests.

    Without a mirror it is the published folder ``path``. PublishError if the mirror cannot make the
    version.
    """
    if mirror is None:
        return path
    body, token = {"version": version, "label": label}, os.environ.get(MIRROR_TOKEN)
    told = calls.post("prepare", f"{mirror}/prepare", body, key=token, advice=_NOT_PREPARED)
    if not isinstance(folder := told.get("path"), str):
        raise calls.refuse(f"its mirror says that the weights are in {folder!r}; {_NOT_PREPARED}")
    return folder
