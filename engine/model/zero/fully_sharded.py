"""ZeRO stage 3 on FSDP2: parameters live as shards and are gathered around each group of blocks.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html. What this file adds: how blocks are
grouped, collectives that are counted and, on gloo, fast (`engine.collectives.fsdp`), and the view of the local
shards that the optimizer and checkpoints read.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from engine.collectives.fsdp import AllGather, ReduceScatter
from engine.collectives.shards import ShardGroup
from engine.mesh import Mesh
from engine.model.zero.arrivals import Arrivals, weakly
from engine.model.zero.layout import DTYPES
from engine.model.zero.shards import MAX_NUMEL_OF_ONE_SUM, ParameterShard, first_nonfinite, sum_of_squares
from engine.parameters import ParameterInfo, ParameterRegistry
from engine.plan import PrecisionPlan, ZeroPlan
from engine.plan.cuts import group_runs, is_cut, row_range
from engine.torch_compat import foreach_norm, reduce_fully_sharded

log = logging.getLogger("engine")


def shard_model(
    model: nn.Module,
    runs: Sequence[Sequence[nn.Module]],
    zero: ZeroPlan,
    precision: PrecisionPlan,
    mesh: Mesh,
    shard_group: ShardGroup,
    replicate_group: ShardGroup,
    prepare: Callable[[Sequence[nn.Module]], None],
) -> None:
    """Apply `fully_shard` to groups of consecutive blocks within each of ``runs`` and to the rest of ``model``.

    Consecutive blocks share a group until it holds ``zero.group_elements`` elements. Before a group is cut,
    ``prepare(modules)`` makes its values real and equal on all ranks, so that no rank ever holds the whole model.
    Parameters that FSDP2 cannot cut (0-dim and empty ones) are left as they are.
    """
    for module in model.modules():
        if getattr(module, "sparse", False) is True:
            module.sparse = False  # type: ignore[assignment]  # an embedding: FSDP2 reduces dense gradients only
    policy = MixedPrecisionPolicy(
        param_dtype=None if precision.compute == "fp32" else DTYPES[precision.compute],
        reduce_dtype=None if any(p.dtype == torch.float64 for p in model.parameters()) else DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )
    arguments = {"mesh": mesh.device_mesh("dp_replicate", "dp_shard"), "mp_policy": policy}
    group_of: dict[nn.Module, Sequence[nn.Module]] = {}
    separate = set(alone(model, [block for run in runs for block in run]))
    groups = [g for run in runs for g in group_blocks([b for b in run if b in separate], zero.group_elements)]
    for group in groups:
        prepare(group)
        group_of |= dict.fromkeys(group, group)
        whole = [p for block in group for p in block.parameters() if is_cut(p.shape)]
        fully_shard(  # type: ignore[call-overload]
            list(group), reshard_after_forward=zero.reshard_after_forward, ignored_params=uncut(group), **arguments
        )
        _release(whole)
    prepare([model])
    whole = [p for p in model.parameters() if is_cut(p.shape) and not isinstance(p, DTensor)]
    # the root's own parameters are used first and last: gathering them again for backward would be for nothing
    fully_shard(model, reshard_after_forward=False, ignored_params=uncut([model]), **arguments)  # type: ignore[call-overload]
    _release(whole)
    all_gather, reduce_scatter = AllGather(shard_group), ReduceScatter(shard_group, zero.predivide_factor)
    names = {module: name for name, module in model.named_modules()}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            together = group_of.get(module, [module])
            unit = " and ".join(dict.fromkeys(names[member] or "the model's own parameters" for member in together))
            module.set_custom_all_gather(all_gather.of(unit))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce_scatter.of(unit))  # type: ignore[arg-type]
            if replicate_group.size > 1:
                module.set_all_reduce_hook(replicate_group.count_all_reduce)  # FSDP2's own, between the replicas
            # sums on the wire; the one division is part of the factor that the optimizer applies
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # else ranks that used different parameters would reduce-scatter different sizes
            reduce_unused = getattr(module, "set_reduce_scatter_unused_params", None)  # newer than torch 2.11
            if reduce_unused is not None:
                reduce_unused(True, recurse=False)
            elif module is model and mesh.rank == 0:
                log.warning("stage 3 on torch %s: every rank must use the same parameters in a step", torch.__version__)


def _release(parameters: Sequence[nn.Parameter]) -> None:
    """Let go of what has been cut, also where somebody (a client optimizer, say) still holds the old objects."""
    for parameter in parameters:
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def alone(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with anything outside them. The others stay with the root: FSDP2 replaces
    parameters module by module, so a parameter tied across two groups would come apart."""
    num_names = Counter(p for _, p in model.named_parameters(remove_duplicate=False))

    def is_alone(block: nn.Module) -> bool:
        inside = Counter(p for _, p in block.named_parameters(remove_duplicate=False))
        return all(num_names[p] == number for p, number in inside.items())

    return [block for block in blocks if is_alone(block)]


def uncut(modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """The parameters of ``modules`` that stay whole."""
    return {p for module in modules for p in module.parameters() if not is_cut(p.shape)}


def group_blocks(blocks: Sequence[nn.Module], group_elements: int) -> list[list[nn.Module]]:
    """Runs of consecutive blocks of at least ``group_elements`` each; blocks that together hold less get no group."""
    numels = [sum(p.numel() for p in block.parameters()) for block in blocks]
    return [[blocks[position] for position in group] for group in group_runs(numels, group_elements)]


class FullyShardedReduction(Arrivals):
    """The `Reduction` role of stage 3: FSDP2 reduces in every backward, this class reads the result.

    ``whole_windows``: it reduces once, in `finish`, and parameters stay gathered from their first use to there.
    """

    def __init__(
        self,
        model: nn.Module,
        registry: ParameterRegistry,
        managed: Sequence[ParameterInfo],
        zero: ZeroPlan,
        mesh: Mesh,
        shard_group: ShardGroup,
        whole_windows: bool = False,
    ) -> None:
        super().__init__()
        self._root: FSDPModule = model  # type: ignore[assignment]
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._whole_windows = whole_windows
        if whole_windows:
            self._reduce_in_backward(False)
        self._replicas = mesh.degrees["dp_replicate"]
        self.divisor = mesh.dp_size / zero.predivide_factor if zero.reduce_op == "mean" else 1.0 / zero.predivide_factor
        self._device = mesh.device
        self._group = shard_group
        sharded = registry.objects_in(model)
        self.parameters: list[tuple[ParameterInfo, nn.Parameter]] = [(info, sharded[info.index]) for info in managed]
        self.shards = row_shards(model, registry, mesh, {info.index for info in managed}, complement=False)
        self._local = [(shard, sharded[shard.info.index]) for shard in self.shards]
        self._used: set[int] = set()
        self._noted: dict[Tensor, int] = {}
        self._note = weakly(self._note_use)
        self._hooks: list[RemovableHandle] = [model.register_forward_hook(weakly(self._let_go))]
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                self._watch_use(name, module, registry)  # type: ignore[arg-type]

    def _let_go(self, module: nn.Module, args: object, output: object) -> None:
        """After a forward that no backward follows. What stayed gathered would be gathered again on those ranks only
        that asked for a state_dict in between (rank 0, to save buffers), and the collectives would come apart."""
        if not torch.is_grad_enabled():
            for unit in self._units:
                unit.reshard()

    def _watch_use(self, module_name: str, module: nn.Module, registry: ParameterRegistry) -> None:
        """Note which parameters get gradients. Those are the gathered ones, which FSDP2 makes in the first forward and
        keeps: they are found in a hook that runs once, after FSDP2's own."""
        prefix = f"{module_name}." if module_name else ""

        def find(module: nn.Module, args: object) -> None:
            once.remove()
            for name, parameter in module.named_parameters():
                info = registry.by_name.get(registry.aliases.get(prefix + name, prefix + name))
                if info is not None and info.group is not None and info.shape and not isinstance(parameter, DTensor):
                    note = functools.partial(self._note, info.index)
                    self._noted[parameter] = info.index
                    is_frozen = not parameter.requires_grad  # since initialize, perhaps not for long
                    parameter.requires_grad_(True)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(note))
                    parameter.requires_grad_(not is_frozen)

        once = module.register_forward_pre_hook(find)
        self._hooks.append(once)

    def _note_use(self, index: int, parameter: Tensor) -> None:
        self._used.add(index)
        if parameter.grad is not None:
            self._note_arrival(index, parameter.grad)

    def _reduce_in_backward(self, does: bool) -> None:
        self._root.set_is_last_backward(does)
        self._root.set_reshard_after_backward(does)
        self._root.set_requires_gradient_sync(does)

    def _reduce_at_once(self) -> None:
        self._reduce_in_backward(True)
        reduce_fully_sharded(self._root)  # type: ignore[arg-type]
        self._reduce_in_backward(False)

    def collect(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and parameter in self._noted:
                self._note_use(self._noted[parameter], parameter)

    def begin_backward(self, last: bool) -> None:
        pass  # FSDP2 reduces in every backward

    def end_backward(self) -> None:
        pass

    def finish(self) -> None:
        if self._whole_windows:
            self._reduce_at_once()
        for shard, parameter in self._local:
            gradient = parameter.grad
            if gradient is None:
                shard.parameter.grad = None
                continue
            local = local_part(gradient)
            shard.parameter.grad = local if local.dtype == shard.parameter.dtype else local.to(shard.parameter.dtype)

    @torch.no_grad()
    def sum_of_squares(self, exact: bool = False) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        gradients: dict[int, list[Tensor]] = {}
        for shard in self.shards:
            if shard.parameter.grad is not None:
                gradients.setdefault(shard.info.num_copies, []).append(shard.parameter.grad.reshape(-1))
        for num_copies, alike in gradients.items():
            few = [gradient for gradient in alike if gradient.numel() <= MAX_NUMEL_OF_ONE_SUM and not exact]
            if few:  # one kernel call for all biases and norms
                total.add_(torch.stack(foreach_norm(few)).double().square().sum(), alpha=1.0 / num_copies)
            for gradient in alike:
                if exact or gradient.numel() > MAX_NUMEL_OF_ONE_SUM:
                    total.add_(sum_of_squares(gradient, exact), alpha=1.0 / num_copies)
        return total / self._replicas

    def first_nonfinite(self) -> int | None:
        return first_nonfinite(self.shards)

    def unreduced(self) -> set[int]:
        return set()

    def untouched(self) -> list[int]:
        return [info.index for info, _ in self.parameters if info.index not in self._used]

    @torch.no_grad()
    def adopt_gradients(self, indices: set[int]) -> None:
        self._used |= indices & {info.index for info, _ in self.parameters}
        for shard, parameter in self._local:
            if shard.info.index not in indices or shard.parameter.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_part(parameter.grad).copy_(shard.parameter.grad)

    def drop_gradients(self, indices: set[int]) -> None:
        for shard in self.shards:
            if shard.info.index in indices:
                shard.parameter.grad = None

    def publish(self) -> None:
        """The masters are the shards that the next forward gathers. What a forward without a backward (an evaluation
        between backward and step, or before a load) has left gathered is of old values."""
        for module in self._units:
            module.reshard()

    def adopt_values(self) -> None:
        """Nothing to do: there is one copy of the values."""

    def zero_gradients(self) -> None:
        self._used.clear()
        self._scales.clear()
        for _, parameter in self.parameters:
            parameter.grad = None
        for shard in self.shards:
            shard.parameter.grad = None

    def defers(self) -> bool:
        return False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def row_shards(
    model: nn.Module, registry: ParameterRegistry, mesh: Mesh, indices: set[int], complement: bool = True
) -> list[ParameterShard]:
    """This rank's rows of the parameters outside (or, without ``complement``, inside) ``indices``."""
    rank, size = mesh.shard_rank, mesh.shard_size
    sharded = registry.objects_in(model)
    shards = []
    for info in registry.held():
        start, stop = row_range(info.shape, rank, size) if info.shape else (0, 1)
        if start < stop and (info.index in indices) != complement:
            local = nn.Parameter(local_part(sharded[info.index]), requires_grad=info.trainable)
            shards.append(ParameterShard(info, local, start, stop, on_every_rank=not info.shape))
    return shards


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, sharing its storage."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
