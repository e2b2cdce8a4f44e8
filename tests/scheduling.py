"""Which tests go to the same process of pytest-xdist."""

from xdist.scheduler import LoadFileScheduling

SHARING = {
    # The warm ranks and the recorded traces.
    "tests/faults/": "faults",
    # One Ray.
    "tests/engine/workers/": "ray",
    "tests/engine/launch/test_on_ray.py": "ray",
    "tests/recover/saving/test_hf_exports.py": "ray",
    "tests/recover/test_handler_ray.py": "ray",
    "tests/recover/test_supervisor.py": "ray",
}
"""Beginning of a test's path -> the tests with which it shares what takes seconds to make."""


class ByFile(LoadFileScheduling):
    """Sends all tests of a file to one process, and all that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((group for start, group in SHARING.items() if file.startswith(start)), file)
