"""Scenarios during which faults are injected: snapshots of two ranks, an export, publications, a
copy to a mirror.

A scenario is built once, in its own folder, by an undisturbed run. Every fault is injected into a
copy of that folder: new ranks `arm` (build engines, resume, train a step) and then perform the
scenario's action under a `Shim`. Then new ranks `check` the files: they must be equal to the old or
the new state, complete and to the bit. No generation may be quarantined, all partial files must be
removed, and the action must succeed when repeated.
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

from holdfast.engine import PublishedCopy, WeightUpdateMeta, save_hf
from holdfast.engine.hf.versions import published_versions, version_path
from holdfast.engine.memory.tensors import local_tensor
from holdfast.engine.servers.publish import publish_weights
from holdfast.recover import GenerationStore
from holdfast.recover.storage.generations import Generation
from holdfast.recover.storage.mirror import Mirror
from holdfast.utils.distributed import rank_zero_decides
from holdfast.utils.errors import CheckpointExistsError
from holdfast.utils.manifest import MANIFEST_NAME, verify_folder
from tests.engine.hf.mirrored import files_of_version
from tests.faults.snapshots import Action, Logged, Resume, Snapshot, Tree, tree


class Scenario(Protocol):
    """An operation of two ranks on a folder that may be interrupted at any moment."""

    @property
    def name(self) -> str:
        """Name for people and test ids."""
        ...

    def build(self, rank: int, root: str) -> Any:
        """Create the initial folder. The return values of all ranks go to `learn`."""
        ...

    def learn(self, built: list[Any]) -> Self:
        """Return the scenario with the results of an undisturbed run."""
        ...

    def arm(self, rank: int, root: str) -> Action:
        """Prepare in new processes. Faults are injected into the returned action."""
        ...

    def check(self, rank: int, root: str) -> bool:
        """Check, in new processes, that the folder is valid and that the action works there.

        Returns:
            Whether the action's effect was already there.

        Raises:
            AssertionError: something was lost, or is wrong.
        """
        ...


@dataclass(frozen=True)
class Export:
    """Write a Hugging Face folder next to an older one.

    Attributes:
        model: folder with config and tokenizer, from `write_model_folder`.
        wanted: step -> files of its folder.
    """

    model: str
    name: str = "export"
    wanted: dict[int, Tree] = field(default_factory=dict)

    def build(self, rank: int, root: str) -> dict[int, Tree]:
        """Write step 1 in its place, and step 2 next to the root to learn its bytes."""
        self._save(1, self._path(root, 1))
        reference = Path(f"{root}.reference")
        self._save(2, reference)
        return {1: tree(self._path(root, 1)), 2: tree(reference)}

    def learn(self, built: list[dict[int, Tree]]) -> "Export":
        return replace(self, wanted=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """Build the model. The action saves it."""
        model = sharded_model(self.model, 2)
        return lambda: save_hf(model, self._path(root, 2), base_model_path=self.model)

    def check(self, rank: int, root: str) -> bool:
        """Check the bytes of both folders. If the new one is missing, it can be written."""
        was_there = self._path(root, 2).exists()
        assert tree(self._path(root, 1)) == self.wanted[1]
        assert not was_there or tree(self._path(root, 2)) == self.wanted[2], (
            "half an export became visible"
        )
        dist.barrier()  # all ranks have looked
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
    """Checks the folder at the moment it is told to load it."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Return the version if the folder is complete and there are no partial files next to
        it.
        """
        assert verify_folder(path)["weight_version"] == version
        return version


@dataclass(frozen=True)
class Publication:
    """Publish version 3 next to 1 and 2. Version 1 is then deleted.

    Attributes:
        model: folder with config and tokenizer, from `write_model_folder`.
        wanted: version -> files of its folder.
    """

    model: str
    name: str = "publication"
    wanted: dict[int, Tree] = field(default_factory=dict)

    def build(self, rank: int, root: str) -> dict[int, Tree]:
        """Write versions 1 and 2 in their place, and 3 next to the root to learn its bytes."""
        wanted = {version: tree(self._publish(f"{root}/weights", version)) for version in (1, 2)}
        return wanted | {3: tree(self._publish(f"{root}.reference", 3))}

    def learn(self, built: list[dict[int, Tree]]) -> "Publication":
        return replace(self, wanted=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """Build the model. The action publishes it."""
        return partial(self._publish, f"{root}/weights", 3, sharded_model(self.model, 3))

    def check(self, rank: int, root: str) -> bool:
        """Check the bytes of all visible versions, and publish 3, again or for the first time."""
        folder = Path(root) / "weights"
        before = published_versions(folder)
        assert before in ([1, 2], [1, 2, 3], [2, 3])
        for version in before:
            assert tree(version_path(folder, version)) == self.wanted[version], (
                f"version {version} is torn"
            )
            assert verify_folder(version_path(folder, version))["weight_version"] == version
        dist.barrier()  # all ranks have looked
        self._publish(str(folder), 3)
        assert sorted(os.listdir(folder)) == ["v00000002", "v00000003"]
        assert tree(version_path(folder, 3)) == self.wanted[3]
        return 3 in before

    def _publish(self, folder: str, version: int, model: Any = None) -> Path:
        model = sharded_model(self.model, version) if model is None else model
        meta = WeightUpdateMeta("disk", folder, keep=2)
        return publish_weights(model, meta, version, [Server()], base_model_path=self.model).path


class MirroredServer:
    """A server with a mirror that makes the files of a version from deltas, and compares them with
    its manifest.
    """

    mirror = "http://127.0.0.1:9000"

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Return the version if its files can be made."""
        files_of_version(Path(path).parent, version)
        return version


@dataclass(frozen=True)
class Delta:
    """Publish version 3 as the changes from 2, which is a delta from 1.

    Attributes:
        model: folder with config and tokenizer, from `write_model_folder`.
        wanted: version -> files of its folder, and in 0 those of a full version 3.
    """

    model: str
    name: str = "delta"
    wanted: dict[int, Tree] = field(default_factory=dict)

    def build(self, rank: int, root: str) -> dict[int, Tree]:
        """Publish 1 and 2 in their place, and all next to the root to learn their bytes."""
        self._publish_first(root)
        copy = self._publish_first(reference := f"{root}.reference")
        wanted = {3: tree(self._publish(reference, 3, copy))}
        assert sorted(wanted[3]) == [
            "delta/manifest.json",
            *(f"delta/rank_0000{n}.safetensors" for n in (0, 1)),
            MANIFEST_NAME,
        ]
        wanted |= {version: tree(version_path(f"{root}/weights", version)) for version in (1, 2)}
        return wanted | {0: tree(self._publish(reference, 3, PublishedCopy()))}

    def learn(self, built: list[dict[int, Tree]]) -> "Delta":
        return replace(self, wanted=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """Publish 1 and 2 again, so that this process has their bytes. The action publishes 3."""
        copy = self._publish_first(root)
        return partial(self._publish, root, 3, copy, self._trained(3))

    def check(self, rank: int, root: str) -> bool:
        """Check the bytes of all visible versions, and publish 3, for which these processes have no
        base.
        """
        folder = Path(root) / "weights"
        before = published_versions(folder)
        assert before in ([1, 2], [1, 2, 3])
        for version in before:
            assert tree(version_path(folder, version)) == self.wanted[version], (
                f"version {version} is torn"
            )
        if rank == 0:
            files_of_version(folder, before[-1])
        dist.barrier()  # all ranks have looked
        self._publish(root, 3, PublishedCopy())
        assert published_versions(folder) == [1, 2, 3], "2 is made from 1"
        assert tree(version_path(folder, 3)) == self.wanted[0]
        return 3 in before

    def _publish_first(self, root: str) -> PublishedCopy:
        copy = PublishedCopy()
        for version in (1, 2):
            self._publish(root, version, copy)
        return copy

    def _trained(self, version: int) -> Any:
        return change_a_little(sharded_model(self.model, 0), version)

    def _publish(self, root: str, version: int, copy: PublishedCopy, model: Any = None) -> Path:
        model = self._trained(version) if model is None else model
        meta = WeightUpdateMeta("disk", f"{root}/weights", keep=2, delta=True)
        servers: Any = [MirroredServer()]
        return publish_weights(
            model, meta, version, servers, base_model_path=self.model, copy=copy
        ).path


def change_a_little(model: Any, amount: float) -> Any:
    """Add ``amount`` to the first elements of each parameter on this rank. Returns the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).view(-1)[:2].add_(amount)
    return model


@dataclass(frozen=True)
class MirrorCopy:
    """Rank 0 copies the newer of two snapshots to a folder with a copy of the older one, which is
    then deleted.

    Attributes:
        local: files of the run's folder.
    """

    name: str = "mirror copy"
    local: Tree = field(default_factory=dict)

    def build(self, rank: int, root: str) -> Tree:
        """Take two snapshots and copy the older one."""
        Snapshot(self.name, base=1).build(rank, root)
        if rank == 0:
            self._copy(root, 0)
        return tree(f"{root}/e")

    def learn(self, built: list[Tree]) -> "MirrorCopy":
        return replace(self, local=built[0])

    def arm(self, rank: int, root: str) -> Action:
        """Return the action, which copies."""
        return partial(self._copy, root, 1) if rank == 0 else lambda: None

    def check(self, rank: int, root: str) -> bool:
        """Check that there is a copy, that every valid copy is complete, and that the new one can
        be made.
        """
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
    """A tiny language model with weights drawn from ``seed``, sharded over all ranks."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


SCENARIOS = ("first snapshot", "snapshot that retires", "export", "publication")
"""Names for `make_scenario` of everything that all ranks write together."""
WITH_LOG = "dump with a log"
EVERY = (*SCENARIOS, WITH_LOG, "delta", "mirror copy", "resume")
"""All names for `make_scenario`."""


def make_scenario(name: str, model: str) -> Scenario:
    """Return a scenario by its name, not built yet. ``model`` is a folder with config and
    tokenizer.
    """
    match name:
        case "first snapshot":
            return Snapshot(name, base=-1)
        case "snapshot that retires":
            return Snapshot(name, base=1)
        case "dump with a log":
            return Logged(name, base=1)
        case "export":
            return Export(model)
        case "publication":
            return Publication(model)
        case "delta":
            return Delta(model)
        case "mirror copy":
            return MirrorCopy()
        case "resume":
            return Resume(Snapshot(name, base=1))
    raise ValueError(name)
