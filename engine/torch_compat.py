"""The only place for private torch names, each with the reason and what would make it go.

Right for torch 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# The multi-tensor kernels that torch.optim is built on: one launch for a list of tensors. They have no public spelling
# (https://pytorch.org/docs/stable/torch.html#foreach-operations lists them under these names).
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_max = torch._foreach_max
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_
foreach_sqrt_ = torch._foreach_sqrt_


DispatchMode = TorchDispatchMode
"""Sees every operation below autograd. Documented in torch's notes on extending; goes when it has a public address."""

SOFTMAX_OPERATIONS = (torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default)
"""What softmax and the attention of the MATH backend come to below autograd; both take (scores, dim, ...)."""


def unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` divides the gradients by ``optimizer.grad_scale`` inside its own kernel.

    The mark that torch.amp.GradScaler looks for on fused optimizers; goes when torch documents one.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def default_store() -> dist.Store | None:
    """The store at which the ranks of the default process group met; None without a group or with one that has none.

    Goes when torch gives public access to it.
    """
    return distributed_c10d._get_default_store() if dist.is_initialized() else None


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested dicts, lists and tuples, Hugging Face outputs included.

    torch.utils._pytree is what FSDP2 and the pipeline use; goes when torch has a public one.
    """
    return _pytree.tree_leaves(tree)


def tree_map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``function(tensor)``."""
    return _pytree.tree_map_only(Tensor, function, tree)


def tree_map_named_tensors(function: Callable[[str, Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with every tensor replaced by ``function(name, tensor)``; names are keys and positions, dotted."""

    def apply(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        parts = (getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", ""))) for entry in path)
        return function(".".join(map(str, parts)), leaf)

    return _pytree.tree_map_with_path(apply, tree)


def store_of(group: dist.ProcessGroup | None) -> dist.Store:
    """The key-value store through which the ranks of ``group`` (None: the default one) met.

    `ProcessGroup.get_group_store` is public but undocumented; where it is missing, torch's own getter of the default
    store is the only other way. Goes when torch documents one.
    """
    get = getattr(group, "get_group_store", None)
    return get() if get is not None else dist.distributed_c10d._get_default_store()


def in_backward() -> bool:
    """Whether this thread runs a node of autograd's backward, as forwards do whose activations are computed again.

    Goes when torch has a public question for it; torch.utils.checkpoint itself asks this one.
    """
    return backward_under_way() != -1


def backward_under_way() -> int:
    """Which backward this thread runs a node of; -1: none. Goes when `in_backward` does."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(call: Callable[[], Any]) -> None:
    """Call ``call()`` when the backward under way has come to its end (not where it raises). FSDP2 and DDP wait so;
    goes when torch gives it a public name."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def num_writes(tensor: Tensor) -> int:
    """How often a tensor has been changed in place. Autograd's own count; goes when torch gives it a public name."""
    return int(tensor._version)


_veto: list[Callable[[list[Tensor]], bool]] = []


def veto_clipping(is_vetoed: Callable[[list[Tensor]], bool]) -> None:
    """Let ``is_vetoed(gradients)`` see what `torch.nn.utils.clip_grad_norm_` is about to clip; where it says so, the
    norm is taken for 0, which clips nothing.

    A hook into a private helper, as torch offers none: scripts hold ``clip_grad_norm_`` itself under names of their
    own, and what it looks up at each call is this. Goes when parameters can refuse to be clipped.
    """
    module = torch.nn.utils.clip_grad
    if not _veto:
        take_norm = module._get_total_norm

        def take_norm_or_zero(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
            gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            norm = take_norm(gradients, *args, **kwargs)
            return torch.zeros_like(norm) if any(veto(gradients) for veto in _veto) else norm

        module._get_total_norm = take_norm_or_zero
    if is_vetoed not in _veto:
        _veto.append(is_vetoed)


def flash_attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's attention on the CPU with the log-sum-exp that `scaled_dot_product_attention` keeps to itself.

    Goes when torch returns it from a public function, as FlexAttention does (whose backward does not run on the CPU).
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sum = kernel(query, key, value, 0.0, is_causal, scale=scale)
    return output, log_sum


def flash_attention_cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `flash_attention_cpu`; ``output`` and ``log_sum`` may be those over further keys."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found: tuple[Tensor, Tensor, Tensor] = kernel(
        gradient, query, key, value, output, log_sum, 0.0, is_causal, scale=scale
    )
    return found


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors have shapes, dtypes and a device, but no memory.

    torch's FakeTensorMode, which torch.export and torch.compile rest on; goes when torch exports it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def flops_of_cpu_attention() -> dict[Any, Callable[..., int]]:
    """What FlopCounterMode lacks: scaled dot product attention as the CPU's own kernel computes it."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(gradient, query, key, value)

    return {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with every leaf replaced by ``function(leaf)``."""
    return _pytree.tree_map(function, tree)


_SCHEDULE_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def pipeline_orders(
    schedule: str, num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> dict[int, list[tuple[str, int, int] | None]]:
    """The order in which each rank computes: (F, B, I or W, stage, micro-batch), None for a slot in which it waits.

    torch's schedules compute it in their constructors and keep it in ``pipeline_order``, which has no public name; they
    want stages, of which they read only numbers here. Goes when torch gives access to the order without stages.
    """
    from torch.distributed import pipelining  # slow to import, and few runs need it

    stages = [
        SimpleNamespace(
            stage_index=index * num_ranks, num_stages=num_ranks * virtual_stages, group_size=num_ranks, group_rank=0,
            is_first=index == 0, is_last=False, has_backward=True, submod=torch.nn.Identity(), device="cpu",
        )
        for index in range(virtual_stages)
    ]  # fmt: skip
    name = _SCHEDULE_CLASSES[schedule]
    kind = getattr(pipelining, name, None) or getattr(pipelining.schedules, name)
    is_single = schedule in ("gpipe", "1f1b")
    made = kind(stages[0] if is_single else stages, num_micro_batches, loss_fn=lambda output, target: output)

    def flat(action: Any) -> list[tuple[str, int, int] | None]:
        if action is None:
            return [None]
        if action.sub_actions is not None:
            return [entry for part in action.sub_actions for entry in flat(part)]
        kind = action.computation_type.value
        return [(kind, action.stage_index, action.microbatch_index)] if kind in "FBIW" else []

    by_rank = {rank: [e for action in order for e in flat(action)] for rank, order in made.pipeline_order.items()}
    if schedule == "1f1b":  # torch 2.13 numbers the last rank's forwards from 1
        for rank, order in by_rank.items():
            numbers = itertools.count()
            by_rank[rank] = [(e[0], e[1], next(numbers)) if e is not None and e[0] == "F" else e for e in order]
    return by_rank


def backward_of_inputs(
    roots: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> list[dict[str, Any]]:
    """The first half of a backward: ``.grad`` of ``inputs``. Returns what `backward_of_weights` goes on with.

    torch.distributed.pipelining's, which is private; goes when torch documents one.
    """
    from torch.distributed.pipelining import _backward

    own = [root.clone() if root._is_view() else root for root in roots]  # it detaches them in place
    return _backward.stage_backward_input(
        own,
        None if gradients is None else list(gradients),
        list(inputs),
        iter(weights),  # type: ignore[arg-type]
    )[1]


def backward_of_weights(weights: Sequence[Tensor], rest: list[dict[str, Any]]) -> None:
    """The second half: adds to ``.grad`` of ``weights``, without calling the hooks that wait for a gradient there."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), rest)  # type: ignore[arg-type]


def reduce_fully_sharded(root: torch.nn.Module) -> None:
    """Let FSDP2 reduce, once, what backward passes have left under ``set_requires_gradient_sync(False)``.

    What torch's own pipeline does at the end of a step (`_PipelineStageBase.perform_reduce_grad`): FSDP2 reduces in
    hooks of a backward only, and which backward is a rank's last depends on the schedule. Goes when FSDP2 has a call.
    """
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(root)  # type: ignore[attr-defined]
    for part in state._state_ctx.all_states:
        groups = getattr(part, "_fsdp_param_groups", None)
        for group in [part._fsdp_param_group] if groups is None else groups:
            if group is not None:
                group.post_backward()
    state._root_post_backward_final_callback()


def children_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The module's own table of children: live, in the order of registration, one that has two names under both.

    `named_children` leaves such a one out the second time, and `add_module` refuses dots in names. Goes when torch
    offers the table.
    """
    return module._modules
