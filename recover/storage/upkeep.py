"""What becomes of committed generations: copied to the mirror, kept while a rule wants them, then retired."""

from ..config import RecoverConfig
from .generations import Generation, GenerationStore
from .mirror import Mirror
from .retention import RetentionRules


class GenerationUpkeep:
    """The upkeep of one run's generations, in the leader.

    Args:
        config: its retention and mirror keys.
        store: where the generations are.

    Attributes:
        mirror: where copies go, once `open_mirror` was called; None: nowhere.
    """

    def __init__(self, config: RecoverConfig, store: GenerationStore) -> None:
        self.mirror: Mirror | None = None
        self._config, self._store, self._rules = config, store, RetentionRules.from_config(config)

    def open_mirror(self) -> None:
        """Connect to the mirror, if there is to be one; a second call does nothing.

        Raises:
            ConfigError: its URL cannot be used.
        """
        if self._config.mirror_path is not None and self.mirror is None:
            self.mirror = Mirror(self._config.mirror_path, self._config.mirror_max_to_keep)

    def copy(self, generation: Generation) -> None:
        """Copy a generation of the store in the background."""
        if self.mirror is not None and generation.path.parent.resolve() == self._store.root.resolve():
            self.mirror.submit(generation)

    def committed(self, generation: Generation) -> None:
        """Copy a new generation, and retire what no rule wants beside it."""
        self.copy(generation)
        self.retire()

    def retire(self) -> None:
        """Remove the generations that no rule wants and nobody copies."""
        self._store.retire(self._rules, set() if self.mirror is None else self.mirror.pinned())

    def finish_copies(self) -> None:
        """Wait for copies that are under way, for ``mirror_timeout_s``."""
        if self.mirror is not None:
            self.mirror.wait(self._config.mirror_timeout_s)

    def close(self, wait: bool) -> None:
        """Give the mirror up, with ``wait`` after its copies, and retire what had to wait for them."""
        if self.mirror is not None:
            self.mirror.close(self._config.mirror_timeout_s if wait else 0.0)
            self.retire()
