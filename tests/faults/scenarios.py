"""What is done while things break: snapshots of two ranks, an export, a publication, a copy to a mirror.

A scenario is built once, in a folder of its own, by a run that nothing disturbs. Every fault is injected into a copy
of that folder: fresh ranks `arm` (build their engines, resume, train a step) and then do the one thing that the
scenario is about, under a `Shim`. Then fresh ranks `check` what is on disk: it must be what was before, or what was to
come, whole and to the bit; nothing is quarantined, everything half-done is swept, and the same thing can be done again.
"""

import os
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.engine import WeightUpdateMeta, save_hf
from holdfast.engine.hf.versions import published_versions, version_path
from holdfast.engine.servers.publish import publish_weights
from holdfast.recover import GenerationStore
from holdfast.recover.storage.generations import Generation
from holdfast.recover.storage.mirror import Mirror
from holdfast.utils.distributed import rank_zero_decides
from holdfast.utils.errors import CheckpointExistsError
from holdfast.utils.manifest import verify_folder
from tests.faults.snapshots import Action, Resume, Snapshot, Tree, tree


class Scenario(Protocol):
    """Something that two ranks do to a folder, and must be able to be stopped in at any moment."""

    @property
    def name(self) -> str:
        """For people and test ids."""
        ...

    def build(self, rank: int, root: str) -> Any:
        """Make the folder as it is before; what it returns, of all ranks, is given to `learn`."""
        ...

    def learn(self, built: list[Any]) -> Self:
        """The scenario that knows what a run that nothing disturbs leads to."""
        ...

    def arm(self, rank: int, root: str) -> Action:
        """Get ready in fresh processes; the action is what is to be disturbed."""
        ...

    def check(self, rank: int, root: str) -> bool:
        """See that the folder is sound, in fresh processes, and that the action works there.

        Returns:
            whether the action's effect had been there already.

        Raises:
            AssertionError: something was lost, or is wrong.
        """
        ...


@dataclass(frozen=True)
class Export:
    """Write a Hugging Face folder beside an older one.

    Attributes:
        model: folder with config and tokenizer, from `write_model_folder`.
        wanted: step -> files of its folder.
    """

    model: str
    name: str = "export"
    wanted: dict[int, Tree] = field(default_factory=dict)

    def build(self, rank: int, root: str) -> dict[int, Tree]:
        """Step 1 in its place, step 2 beside the root, for its bytes."""
        self._save(1, self._path(root, 1))
        reference = Path(f"{root}.reference")
        self._save(2, reference)
        return {1: tree(self._path(root, 1)), 2: tree(reference)}

    def learn(self, built: list[dict[int, Tree]]) -> "Export":
        """Remember the bytes."""
        return replace(self, wanted=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """Make the model; the action saves it."""
        model = sharded_model(self.model, 2)
        return lambda: save_hf(model, self._path(root, 2), base_model_path=self.model)

    def check(self, rank: int, root: str) -> bool:
        """Both folders have the right bytes, or the new one is not there and can be made."""
        was_there = self._path(root, 2).exists()
        assert tree(self._path(root, 1)) == self.wanted[1]
        assert not was_there or tree(self._path(root, 2)) == self.wanted[2], "half an export became visible"
        dist.barrier()  # all have looked
        try:
            self._save(2, self._path(root, 2))
        except CheckpointExistsError:
            assert was_there
        assert tree(self._path(root, 2)) == self.wanted[2]
        assert sorted(os.listdir(Path(root) / "hf")) == ["global_step_1", "global_step_2"]
        return was_there

    def _save(self, step: int, path: Path) -> None:
        save_hf(sharded_model(self.model, step), path, base_model_path=self.model)

    def _path(self, root: str, step: int) -> Path:
        return Path(root) / "hf" / f"global_step_{step}"


class Server:
    """Looks at what it is told to load at the moment it is told."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """The version, when the folder is complete and nothing half-done lies beside it."""
        assert verify_folder(path)["weight_version"] == version
        return version


@dataclass(frozen=True)
class Publication:
    """Publish version 3 beside 1 and 2, of which 1 is then deleted.

    Attributes:
        model: folder with config and tokenizer, from `write_model_folder`.
        wanted: version -> files of its folder.
    """

    model: str
    name: str = "publication"
    wanted: dict[int, Tree] = field(default_factory=dict)

    def build(self, rank: int, root: str) -> dict[int, Tree]:
        """Versions 1 and 2 in their place, 3 beside the root, for its bytes."""
        wanted = {version: tree(self._publish(f"{root}/weights", version)) for version in (1, 2)}
        return wanted | {3: tree(self._publish(f"{root}.reference", 3))}

    def learn(self, built: list[dict[int, Tree]]) -> "Publication":
        """Remember the bytes."""
        return replace(self, wanted=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """Make the model; the action publishes it."""
        return partial(self._publish, f"{root}/weights", 3, sharded_model(self.model, 3))

    def check(self, rank: int, root: str) -> bool:
        """What is visible has the right bytes, and 3 can be published, again or for the first time."""
        folder = Path(root) / "weights"
        before = published_versions(folder)
        assert before in ([1, 2], [1, 2, 3], [2, 3])
        for version in before:
            assert tree(version_path(folder, version)) == self.wanted[version], f"version {version} is torn"
            assert verify_folder(version_path(folder, version))["weight_version"] == version
        dist.barrier()  # all have looked
        self._publish(str(folder), 3)
        assert sorted(os.listdir(folder)) == ["v00000002", "v00000003"]
        assert tree(version_path(folder, 3)) == self.wanted[3]
        return 3 in before

    def _publish(self, folder: str, version: int, model: Any = None) -> Path:
        model = sharded_model(self.model, version) if model is None else model
        meta = WeightUpdateMeta("disk", folder, keep=2)
        return publish_weights(model, meta, version, [Server()], base_model_path=self.model).path


@dataclass(frozen=True)
class MirrorCopy:
    """Copy the newer of two snapshots to a folder where the older one is, which is then deleted. Rank 0 does it.

    Attributes:
        local: files of the run's folder.
    """

    name: str = "mirror copy"
    local: Tree = field(default_factory=dict)

    def build(self, rank: int, root: str) -> Tree:
        """Two snapshots, the older one copied."""
        Snapshot(self.name, base=1).build(rank, root)
        if rank == 0:
            self._copy(root, 0)
        return tree(f"{root}/e")

    def learn(self, built: list[Tree]) -> "MirrorCopy":
        """Remember the local files."""
        return replace(self, local=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """The action copies."""
        return partial(self._copy, root, 1) if rank == 0 else lambda: None

    def check(self, rank: int, root: str) -> bool:
        """Every copy that counts is whole, there is one, and the new one can be made."""
        return rank_zero_decides(partial(self._check, root))

    def _check(self, root: str) -> bool:
        assert tree(f"{root}/e") == self.local, "copying has changed what it copies"
        mirror = self._mirror(root)
        steps = mirror.steps()
        assert steps in ([0], [1, 0], [1])
        fetched = GenerationStore(Path(f"{root}.fetched"))
        for step in steps:
            assert tree(mirror.fetch(step, fetched).path) == tree(self._generation(root, step).path)
        shutil.rmtree(fetched.root)
        self._copy(root, 1)
        assert mirror.steps() == [1]
        assert os.listdir(f"{root}/mirror") == ["global_step_1"]
        assert tree(f"{root}/mirror/global_step_1") == tree(self._generation(root, 1).path)
        return 1 in steps

    def _copy(self, root: str, step: int) -> None:
        mirror = self._mirror(root)
        mirror.submit(self._generation(root, step))
        assert mirror.wait(30) and mirror.last_error is None, mirror.last_error
        mirror.close(30)

    def _mirror(self, root: str) -> Mirror:
        return Mirror(f"file://{root}/mirror", keep=1)

    def _generation(self, root: str, step: int) -> Generation:
        return Generation(step, Path(root, "e", "t", "recover", f"global_step_{step}"))


def sharded_model(folder: str, seed: int) -> Any:
    """A tiny language model with weights drawn from ``seed``, over all ranks."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


SCENARIOS = ("first snapshot", "snapshot that retires", "export", "publication")
"""What all ranks write together; names for `make_scenario`."""
EVERY = (*SCENARIOS, "mirror copy", "resume")
"""All that `make_scenario` knows."""


def make_scenario(name: str, model: str) -> Scenario:
    """A scenario by its name, not built yet; ``model`` is a folder with config and tokenizer."""
    match name:
        case "first snapshot":
            return Snapshot(name, base=-1)
        case "snapshot that retires":
            return Snapshot(name, base=1)
        case "export":
            return Export(model)
        case "publication":
            return Publication(model)
        case "mirror copy":
            return MirrorCopy()
        case "resume":
            return Resume(Snapshot(name, base=1))
    raise ValueError(name)
