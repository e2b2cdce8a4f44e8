"""Private names of torch: contents of modules, parts of sharded tensors, and DCP's file records."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.utils.data import IterableDataset

from . import privates, require, require_attributes

_DCP = "torch.distributed.checkpoint.filesystem"
_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_REDUCE = "reduce gradients that only some ranks have"

NAMES = privates(
    {
        "know which part of a tensor is this rank's": [
            "torch.distributed.tensor.placement_types:_StridedShard(dim, split_factor)",
            "torch.distributed.device_mesh:DeviceMesh._get_root_mesh",
        ],
        "make sharded tensors of what it holds already": [
            "torch.distributed.tensor._dtensor_spec:DTensorSpec(mesh, placements, tensor_meta)",
            "torch.distributed.tensor._dtensor_spec:TensorMeta(shape, stride, dtype)",
            "torch.distributed.tensor:DTensor._spec",
        ],
        "read and write .metadata of DCP": [f"{_DCP}:_StorageInfo(relative_path, offset, length)"],
        "write .metadata of DCP": [f"{_DCP}:CURRENT_DCP_VERSION"],
        "leave NCCL when a peer is dead": [
            "torch.distributed.distributed_c10d:_abort_process_group(group)"
        ],
        _REDUCE: [
            "torch.distributed.fsdp:FSDPModule._get_fsdp_state",
            f"{_GROUP}:FSDPParamGroup.post_backward",
            f"{_GROUP}:FSDPParamGroup.is_unsharded",
            f"{_GROUP}:FSDPParam.sharded_param",
            f"{_GROUP}:FSDPParam._unsharded_param",
            f"{_GROUP}:FSDPParam.unsharded_param",
            f"{_GROUP}:FSDPParam.unsharded_accumulated_grad",
            f"{_GROUP}:FSDPParam.accumulate_unsharded_grad_if_needed()",
            f"{_GROUP}:FSDPParam.to_accumulated_grad_if_needed()",
        ],
        "tell whether a profiler runs": [
            "torch.autograd:_profiler_enabled()",
            "torch.autograd.profiler:_is_profiler_enabled",
        ],
        "step through an optimizer block by block": ["torch.optim:Optimizer._patch_step_function"],
        "clip a gradient": ["torch:_foreach_norm", "torch:_foreach_mul_"],
        "update moments in bfloat16": [
            f"torch:_foreach_{name}_"
            for name in ("add", "addcdiv", "addcmul", "copy", "div", "lerp", "mul")
        ],
        "switch dropout off": ["torch.nn.modules.dropout:_DropoutNd"],
        "follow conversions of weights": [
            "torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__",
            "torch.utils._pytree:tree_leaves(tree)",
            "torch:ops.aten.clone.default._schema.is_mutable",
        ],
        "compute the memory of a step without memory": [
            "torch._subclasses.fake_tensor:FakeTensorMode()"
        ],
        "let an output be used as its logits": ["torch.utils._pytree:tree_map(func, tree)"],
        "tell whether tensors share memory": ["torch:UntypedStorage._cdata"],
        "notice that a tensor was written to while it was copied": ["torch:Tensor._version"],
        "notice that a result that a checkpoint keeps was written to": [
            "torch.ops:aten._unsafe_view",
            "torch:_C._SetExcludeDispatchKeyGuard",
            "torch:_C.DispatchKey.ADInplaceOrView",
        ],
        "tell whether persistent workers have their seed": [
            "torch.utils.data:DataLoader._iterator"
        ],
        "look at a model's modules and tensors without its hooks": [
            f"torch.nn:Module.{name}"
            for name in ("_modules", "_parameters", "_buffers", "_state_dict_pre_hooks")
        ],
        "tell whether somebody looks at what a model's head returns": [
            "torch.nn:Module._forward_hooks"
        ],
        "tell which buffers checkpoints hold": ["torch.nn:Module._non_persistent_buffers_set"],
        "tell which modules add to their state dict": [
            f"torch.nn:Module.{name}" for name in ("_state_dict_hooks", "_save_to_state_dict")
        ],
        "tell which modules take what they added": [
            f"torch.nn:Module.{name}"
            for name in ("_load_state_dict_pre_hooks", "_load_from_state_dict")
        ],
    }
)
if torch.version.cuda is not None:
    NAMES += privates({"free the memory of cuBLAS": ["torch:_C._cuda_clearCublasWorkspaces"]})
require("torch", NAMES)

from torch import _foreach_add_ as foreach_add_
from torch import _foreach_addcdiv_ as foreach_addcdiv_
from torch import _foreach_addcmul_ as foreach_addcmul_
from torch import _foreach_copy_ as foreach_copy_
from torch import _foreach_div_ as foreach_div_
from torch import _foreach_lerp_ as foreach_lerp_
from torch import _foreach_mul_ as foreach_mul_
from torch import _foreach_norm as foreach_norm
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.dropout import _DropoutNd as Dropout
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the direct submodules by name, as a dict that may be changed."""
    return module._modules


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the module's own parameters by name, without submodules, as a dict that may be
    changed.
    """
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers by name, without submodules, as a dict that may be changed."""
    return module._buffers


def without_compile(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile wraps, or the module itself."""
    return getattr(module, "_orig_mod", module)


def free_matrix_workspaces() -> None:
    """Free the memory in which cuBLAS computes (64 MiB on Hopper). Does nothing with a torch for
    CPUs.
    """
    if torch.version.cuda is not None:
        torch._C._cuda_clearCublasWorkspaces()


def has_profiler() -> bool:
    """Return whether a profiler of torch runs in any thread of this process."""
    return torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled


def is_profiled() -> bool:
    """Return whether a profiler of torch that was started in this thread still runs."""
    return torch.autograd._profiler_enabled() and torch.autograd.profiler._is_profiler_enabled


def count_forward_hooks(module: nn.Module) -> int:
    """Count the hooks that see what the forward of the module itself returns. Pre-hooks do not."""
    return len(module._forward_hooks)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether the state dict contains the module's buffer of this name."""
    return buffer not in module._non_persistent_buffers_set


def replace_members(
    module: nn.Module,
    *,
    children: Mapping[str, nn.Module | None] | None = None,
    parameters: Mapping[str, torch.Tensor | None] | None = None,
    buffers: Mapping[str, torch.Tensor | None] | None = None,
) -> None:
    """Replace the members that a view of a module shares with the module. None keeps them.

    A view with other parameters or buffers runs no state-dict pre-hooks, because FSDP2's would
    reshard the live model.
    """
    new = {
        "_modules": children,
        "_parameters": parameters,
        "_buffers": buffers,
    }
    for kind, members in new.items():
        if members is not None:
            module.__dict__[kind] = members
    if parameters is not None or buffers is not None:
        module.__dict__["_state_dict_pre_hooks"] = {}


def save_method_and_hooks(module: nn.Module) -> tuple[Callable[..., Any], list[Callable[..., Any]]]:
    """Return the method that fills the module's part of a state dict, and the hooks after it."""
    return module._save_to_state_dict, list(module._state_dict_hooks.values())


def load_method_and_hooks(module: nn.Module) -> tuple[Callable[..., Any], list[Callable[..., Any]]]:
    """Return the method that reads the module's part of a state dict, and the hooks before it."""
    return module._load_from_state_dict, list(module._load_state_dict_pre_hooks.values())


def made_sharded(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: torch.Size,
    stride: tuple[int, ...],
) -> DTensor:
    """Make a DTensor of this shape and stride from this rank's part ``local``, which stays on its
    device.

    `DTensor.from_local` would move it to the device of the mesh.
    """
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def like_sharded(local: torch.Tensor, sharded: DTensor) -> DTensor:
    """Make a DTensor with the layout, shape and dtype of ``sharded`` from this rank's part
    ``local``.
    """
    return DTensor(local, sharded._spec, requires_grad=False)


def same_layout(one: DTensor, other: DTensor) -> bool:
    """Return whether two DTensors have the same mesh, placements, shape, stride and dtype."""
    return one._spec is other._spec or one._spec == other._spec


def fill_missing_gradients(module: FSDPModule, filled: set[nn.Parameter]) -> None:
    """Make FSDP2 reduce zeros for trained parameters of a module that a backward did not reach on
    this rank.

    FSDP2 reduces the gradients that exist, so ranks that reach different parameters would reduce
    buffers of different lengths. While the all-reduce between replicas is deferred, FSDP2 keeps its
    sum apart from the parameters.

    Args:
        module: module that `fully_shard` was called on.
        filled: receives each sharded parameter whose gradient of this step consists of these zeros
            alone. A later backward of the step that reaches the parameter removes it.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:  # all its parameters belong to nested groups
        return
    attributes = ("fsdp_params", "mesh_info", "reduce_grads", "_partial_reduce_output")
    require_attributes("torch", group, attributes, _REDUCE)
    reduce = group.post_backward

    def fill(missing: list[Any]) -> None:
        # Note which gradients are zeros alone. With a partial sum, an earlier backward of the step
        # may have reached them.
        reached = [param for param in group.fsdp_params if param not in missing]
        filled.difference_update(param.sharded_param for param in reached)
        if group._partial_reduce_output is None:
            filled.update(
                param.sharded_param for param in missing if param.sharded_param.grad is None
            )

        dtypes = [grad.dtype for param in reached for grad in _gradients_of(param)]
        dtype = dtypes[0] if dtypes else None
        for param in missing:
            param.unsharded_accumulated_grad = torch.zeros_like(param.unsharded_param, dtype=dtype)

    def fill_and_reduce(*args: Any) -> None:
        # The ranks reduce if any parameter has a gradient, as FSDP2 itself decides.
        params = group.fsdp_params
        has_gradient = any(_gradients_of(param) for param in params)
        if group.reduce_grads and (group.is_unsharded or has_gradient):
            # FSDP2 needs one dtype for all gradients of a group. Sums of earlier backwards have
            # another one than a gradient of this backward alone.
            if any(param.unsharded_accumulated_grad is not None for param in params):
                for param in params:
                    param.accumulate_unsharded_grad_if_needed()
                    param.to_accumulated_grad_if_needed()

            trained = [param for param in params if param.unsharded_param.requires_grad]
            missing = [param for param in trained if not _gradients_of(param)]
            if missing or filled:
                fill(missing)
        reduce(*args)

    group.post_backward = fill_and_reduce


def _gradients_of(param: Any) -> list[torch.Tensor]:
    """Gradients of a parameter of FSDP2 that wait for the reduction: the sum of earlier backwards,
    and that of the last one.
    """
    found = [param.unsharded_accumulated_grad]
    if hasattr(param, "_unsharded_param"):  # after the first gather
        found.append(param._unsharded_param.grad)
    return [grad for grad in found if grad is not None]


def drop_partial_gradients(module: FSDPModule) -> None:
    """Drop what FSDP2 has accumulated for a module and not yet put into the gradients of its
    parameters.

    ``zero_grad`` does not reach it, so the next backward would add it.
    """
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return
    # The sum that waits for the other replicas, and the gradients that wait for the reduction.
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        param.unsharded_accumulated_grad = None
        if hasattr(param, "_unsharded_param"):  # after the first gather
            param._unsharded_param.grad = None


def has_partial_gradients(module: FSDPModule) -> bool:
    """Return whether `drop_partial_gradients` would drop something."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return False
    if group._partial_reduce_output is not None:
        return True
    return any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params)


def recover_from_failed_backward(model: nn.Module) -> None:
    """Make FSDP2 usable again after an error in a forward or backward, if this torch can do so.

    Does nothing before FSDP2's first forward. On a single rank it never has one.
    """
    if not isinstance(model, FSDPModule) or not hasattr(model, "reset_iter_state"):
        return

    # It is None before the first forward.
    if model._get_fsdp_state()._is_root is not None:
        model.reset_iter_state()


def fsdp_mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the mesh that the outermost FSDP2 module of a model is sharded over. None if there is
    none.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A module whose parameters all belong to nested groups has none of its own.
            group = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                return group.mesh_info.mesh
    return None


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` is a slice of, or the mesh itself."""
    return mesh._get_root_mesh()


def n_writes(tensor: torch.Tensor) -> int:
    """Return torch's count of writes to a tensor or its views. 0 for inference tensors."""
    # torch does not count writes to these.
    if tensor.is_inference():
        return 0
    return tensor._version


def makes_uncounted_view(operator: Any) -> bool:
    """Whether an operator returns a tensor in the memory of its argument, whose `n_writes` are
    counted by themselves. A product of three dimensions is one.
    """
    return operator is torch.ops.aten._unsafe_view.default


def counting_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its graph, in the same memory. `n_writes` of both is one count,
    also inside ``__torch_dispatch__``, where ``detach`` alone would begin another.
    """
    key = torch._C.DispatchKey.ADInplaceOrView
    with torch._C._SetExcludeDispatchKeyGuard(key, False):
        return tensor.detach()


def step_without_hooks(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return ``cls.step`` without its hooks, which torch wraps around it with the first instance of
    ``cls``.
    """
    return inspect.unwrap(cls.step, stop=lambda function: not getattr(function, "hooked", False))


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id that is equal for tensors in the same memory, also on the meta device, while one
    of them lives.
    """
    return tensor.untyped_storage()._cdata


def without_memory() -> AbstractContextManager[Any]:
    """Compute shapes only: tensors in the block have no memory, whatever their device."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode(allow_non_fake_inputs=True)  # `torch.tensor` on the meta device makes one


def writes_in_place(operator: Any) -> bool:
    """Return whether an operator that ``__torch_dispatch__`` receives changes one of its inputs."""
    return operator._schema.is_mutable


def count_skipped_once(loader: Any, state_dict: Mapping[str, Any]) -> None:
    """Correct the counts of a ``StatefulDataLoader`` that has skipped batches of a stream
    (torchdata 0.11).

    It reads a stream without a state of its own again from its beginning, and counts these batches
    a second time, so its next state would be too far. ``state_dict`` is what it was given.
    """
    iterator = getattr(loader, "_iterator", None)
    snapshot = getattr(iterator, "_snapshot", None)
    if iterator is None or not isinstance(loader.dataset, IterableDataset):
        return
    # Without workers there is one count, with workers there are two.
    if snapshot is None:
        iterator._num_yielded = state_dict["_num_yielded"]
        return
    skipped = state_dict["_snapshot"]["_snapshot_step"]
    iterator._num_yielded -= skipped
    snapshot["_snapshot_step"] -= skipped


def is_iterated(loader: Any) -> bool:
    """Return whether a ``DataLoader`` has started its persistent workers."""
    return loader._iterator is not None


def schedules_inside(schedule: Any) -> Sequence[Any]:
    """Return the schedules that a ``SequentialLR`` or ``ChainedScheduler`` combines. Others have
    none.
    """
    return getattr(schedule, "_schedulers", ())


def note_rates(schedule: Any, rates: Sequence[Any]) -> None:
    """Set what ``schedule.get_last_lr()`` returns."""
    schedule._last_lr = list(rates)
