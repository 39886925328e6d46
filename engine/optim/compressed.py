"""What the 1-bit optimizers share: flat state per bucket, masks, error buffers, and when gradients stay local.

They step on whole buckets, a few kernels each and no loop over parameters, and reduce by themselves what the algorithm
sends instead of gradients. So they run where every rank holds everything: at ZeRO stage 0.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.collectives.compressed_all_reduce import CompressedAllReduce, Range
from engine.collectives.ledger import Ledger
from engine.collectives.shards import ShardGroup
from engine.contracts import EngineError
from engine.mesh import Mesh

log = logging.getLogger("engine")

UNITS = ("bucket", "group", "tensor")


class _Shard(Protocol):
    @property
    def info(self) -> Any: ...
    @property
    def parameter(self) -> nn.Parameter: ...


class FlatBucket(Protocol):
    """Whole parameters of one group in one flat buffer (engine/model/zero/buckets.py at stage 0)."""

    master: Tensor
    flat_gradients: Tensor | None

    @property
    def shards(self) -> Sequence[tuple[_Shard, int]]: ...
    @property
    def group(self) -> int: ...


class LocalReduction(Protocol):
    """The role that collects gradients, and asks which of them not to send."""

    @property
    def buckets(self) -> Sequence[Any]: ...

    stays_local: Callable[[Any], bool]

    def publish(self) -> None: ...


@dataclass(frozen=True)
class Stages:
    """The pipeline ranks, each with a part of the parameters.

    ``announces``: whether this rank logs for all. ``holders``: registry index -> the pipeline ranks that hold the
    parameter, of those that several do.
    """

    announces: bool = True
    group: ShardGroup = field(default_factory=ShardGroup.alone)
    holders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def share(self, index: int) -> float:
        """Of a parameter, so that a sum over the stages counts it once."""
        return 1.0 / len(self.holders.get(index, (0,)))


@dataclass(eq=False)
class Flat:
    """One bucket as the optimizer sees it. Tensors are flat, fp32, of the bucket's size, or have one entry a parameter.

    ``names``/``spans``: its parameters in order. ``state`` is saved, ``extra`` lasts until the next load. ``mask``: 0
    where momentum is held at zero, else 1; None: nowhere. ``denominator``: what a frozen variance makes of the update,
    computed once. ``coefficients``: LAMB's, of the last step.
    """

    bucket: FlatBucket
    options: dict[str, Any]
    names: list[str]
    spans: list[Range]
    state: dict[str, Tensor]
    mask: Tensor | None = None
    denominator: Tensor | None = None
    collective: CompressedAllReduce | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)
    coefficients: Tensor | None = None
    is_apart: bool = False
    """Whether ranks hold different values (0/1 Adam between synchronisations)."""

    def __post_init__(self) -> None:
        self.exp_avg, self.exp_avg_sq = self.state["exp_avg"], self.state["exp_avg_sq"]
        self.sizes = [b - a for a, b in self.spans]
        self.lengths = torch.tensor(self.sizes, device=self.exp_avg.device)

    @property
    def values(self) -> Tensor:
        return self.bucket.master.detach()

    @property
    def gradients(self) -> Tensor:
        assert self.bucket.flat_gradients is not None
        return self.bucket.flat_gradients

    def absent_indices(self) -> list[int]:
        """The parameters that no rank has a gradient of in this window: neither they nor their state change."""
        return [i for i, (shard, _) in enumerate(self.bucket.shards) if shard.parameter.grad is None]

    def absent(self) -> list[Range]:
        """Where they lie."""
        return [self.spans[i] for i in self.absent_indices()]

    def expand(self, per_parameter: Tensor) -> Tensor:
        """One entry per element of what has one per parameter."""
        return per_parameter.repeat_interleave(self.lengths, output_size=self.exp_avg.numel())

    def views(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """A flat tensor cut into the parts of its parameters."""
        return tensor.split(self.sizes)


class CompressedOptimizer(torch.optim.Optimizer, ABC):
    """The base of OneBitAdam, ZeroOneAdam and OneBitLamb. Only an engine can step one: see `connect`.

    ``compression_unit``: what has one scale: a ``bucket``, a whole parameter ``group``, or each ``tensor``.
    ``compression_scale``: ``rms`` or ``l1``.
    ``compression_of``: what becomes signs. ``momentum``, as in the papers, gives every element an error of the size of
    the scale s, so the update of one with a small variance errs by s / (sqrt(v) + eps), which nothing bounds.
    ``update`` divides by sqrt(v) + eps first and multiplies afterwards: all elements err alike in the update.
    ``max_update``: once the variance is frozen, no element moves by more than this times the learning rate (0: no
    bound), for a variance that saw no gradient in time does not hold it back.
    ``bias_correction``: Adam's, with the variance frozen as corrected. The papers have none; a variance frozen after
    fewer than 1 / (1 - beta2) steps is then too small, and all later updates too large.
    ``eps_inside_sqrt``: sqrt(v + eps) as the divisor, the papers' notation.
    ``compat="deepspeed"``: of the momentum, without a bound, pads count, masks act on the result alone, and neither
    ``bias_correction`` nor ``eps_inside_sqrt`` does anything.
    Groups may have ``exp_avg_mask`` (a tensor that broadcasts to each of the group's parameters, or a list of one per
    parameter; 0 holds the momentum at zero; never saved) and ``non_freeze`` (plain all-reduce and a living variance).
    """

    PER_ELEMENT: Mapping[str, float] = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    PER_PARAMETER: Mapping[str, float] = {}
    """The state that is saved, and what it is before the first step."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        compression_unit: str = "bucket",
        compression_scale: str = "rms",
        compression_of: str = "update",
        max_update: float = 10.0,
        bias_correction: bool = False,
        eps_inside_sqrt: bool = False,
        compat: str | None = None,
    ) -> None:
        if compression_unit not in UNITS:
            raise ValueError(f"compression_unit must be one of {', '.join(UNITS)}, not {compression_unit!r}")
        if compression_scale not in ("rms", "l1"):
            raise ValueError(f'compression_scale must be "rms" or "l1", not {compression_scale!r}')
        if compression_of not in ("update", "momentum"):
            raise ValueError(f'compression_of must be "update" or "momentum", not {compression_of!r}')
        if not max_update >= 0.0:
            raise ValueError(f"max_update must be positive, or 0 for no bound, not {max_update}")
        if compat not in (None, "deepspeed"):
            raise ValueError(f'compat must be "deepspeed" or absent, not {compat!r}')
        if not all(0.0 <= beta < 1.0 for beta in defaults["betas"]):
            raise ValueError(f"betas must lie in [0, 1), not {defaults['betas']}")
        if not all(float(defaults[key]) >= 0.0 for key in ("lr", "eps", "weight_decay")):
            raise ValueError("lr, eps and weight_decay must not be negative")
        self._unit, self._scale, self._deepspeed = compression_unit, compression_scale, compat == "deepspeed"
        self._divides = compression_of == "update" and not self._deepspeed
        self._max_update = 0.0 if self._deepspeed else max_update
        self._corrects_bias = bias_correction and not self._deepspeed
        self._eps_inside_sqrt = eps_inside_sqrt and not self._deepspeed
        self.flats: list[Flat] = []
        self._of_bucket: dict[int, Flat] = {}
        self._group = ShardGroup.alone()
        self._publish: Callable[[], None] = lambda: None
        self._stages = Stages()
        super().__init__(params, {**defaults, "step": 0})

    # --- connecting ------------------------------------------------------------------------------------------

    def connect(self, reduction: LocalReduction, group: ShardGroup, stages: Stages) -> None:
        """Step on the buckets of ``reduction``, whose ranks are ``group``. Raises EngineError for a model in fp64."""
        self._group, self._publish, self._stages = group, reduction.publish, stages
        for bucket in reduction.buckets:
            if bucket.master.dtype != torch.float32:
                raise EngineError(
                    f"{type(self).__name__} trains models in fp32, bf16 or fp16; {bucket.shards[0][0].info.name} is in "
                    f"{str(bucket.master.dtype).removeprefix('torch.')}"
                )
            spans = [(offset, offset + shard.parameter.numel()) for shard, offset in bucket.shards]
            names = [shard.info.name for shard, _ in bucket.shards]
            state = {key: torch.empty_like(bucket.master) for key in self.PER_ELEMENT}
            state |= {key: bucket.master.new_empty(len(spans)) for key in self.PER_PARAMETER}
            flat = Flat(bucket, self.param_groups[bucket.group], names, spans, state)
            flat.mask = self._mask(flat)
            self.flats.append(flat)
            self._of_bucket[id(bucket)] = flat
        self.initialize_state([parameter for options in self.param_groups for parameter in options["params"]])
        reduction.stays_local = lambda bucket: self.stays_local(self._of_bucket[id(bucket)])

    def _mask(self, flat: Flat) -> Tensor | None:
        given = flat.options.get("exp_avg_mask")
        if given is None:
            return None
        masks = given if isinstance(given, (list, tuple)) else [given] * len(flat.options["params"])
        if len(masks) != len(flat.options["params"]):
            raise EngineError(
                f"exp_avg_mask has {len(masks)} entries for a group of {len(flat.options['params'])} parameters; give "
                "one tensor, or one entry (a tensor or None) per parameter"
            )
        mask_of = dict(zip(flat.options["param_names"], masks, strict=True))
        flat_mask = torch.ones_like(flat.exp_avg)
        for name, (a, b), (shard, _) in zip(flat.names, flat.spans, flat.bucket.shards, strict=True):
            mask = mask_of[name]
            if mask is None:
                continue
            try:
                whole = torch.as_tensor(mask).to(flat_mask).expand(shard.info.global_shape)
            except RuntimeError as error:
                raise EngineError(
                    f"exp_avg_mask of {name} has shape {tuple(mask.shape)}, which does not broadcast to the shape "
                    f"{tuple(shard.info.global_shape)} of the parameter"
                ) from error
            flat_mask[a:b] = (shard.info.part(whole) != 0).to(flat_mask).reshape(-1)
        return flat_mask

    def initialize_state(self, params: Iterable[Tensor]) -> None:
        """Give each parameter the state it would have before its first step, as views of the flat buffers."""
        wanted = set(params)
        for flat in self.flats:
            for i, (shard, _) in enumerate(flat.bucket.shards):
                parameter, span = shard.parameter, slice(*flat.spans[i])
                if parameter not in wanted or self.state.get(parameter):
                    continue
                views = {key: flat.state[key][span].view(parameter.shape) for key in self.PER_ELEMENT}
                views |= {key: flat.state[key][i] for key in self.PER_PARAMETER}
                for key, initial in (*self.PER_ELEMENT.items(), *self.PER_PARAMETER.items()):
                    views[key].fill_(initial)
                self.state[parameter] = views

    # --- what the algorithms say -----------------------------------------------------------------------------

    @abstractmethod
    def stays_local(self, flat: Flat) -> bool:
        """Whether the gradients of the coming step are not to be reduced."""

    @abstractmethod
    def num_variance_updates(self, flat: Flat) -> int:
        """How many gradients the variance has seen, the coming step's included."""

    @abstractmethod
    def update(self, step: int) -> None:
        """One step, the ``step``-th (from 1), on gradients that are unscaled and clipped."""

    @abstractmethod
    def scalars(self) -> Mapping[str, float]:
        """For the monitors. ``Train/compression_stage``: 0 while gradients are all-reduced, 1 from then on."""

    def settle(self) -> None:
        """Collective. Make the ranks hold the same parameters, where the algorithm lets them differ."""

    # --- the step --------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps that were applied."""
        return int(self.param_groups[0]["step"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if not self.flats and any(group["params"] for group in self.param_groups):
            raise EngineError(f"{type(self).__name__} reduces by itself, so only engine.step() can step it")
        if len(self.state) < sum(len(group["params"]) for group in self.param_groups):
            self.initialize_state([parameter for group in self.param_groups for parameter in group["params"]])
        step = self.num_steps + 1
        self.update(step)
        for group in self.param_groups:
            group["step"] = step

    def announce(self, message: str) -> None:
        """A logged event, once for all ranks."""
        if self._stages.announces:
            log.warning("%s", message)

    # --- parts of an update, each over a whole bucket ----------------------------------------------------------

    def divisor(self, flat: Flat) -> Tensor:
        """sqrt(v) + eps, kept until the variance changes (then set ``flat.denominator`` to None)."""
        if flat.denominator is None:
            flat.denominator = self.root(flat, flat.exp_avg_sq, self.num_variance_updates(flat))
        return flat.denominator

    def root(self, flat: Flat, variance: Tensor, num_updates: int) -> Tensor:
        """What divides the momentum, from a variance that was updated ``num_updates`` times."""
        eps, beta2 = flat.options["eps"], flat.options["betas"][1]
        corrected = variance / (1.0 - beta2**num_updates) if self._corrects_bias and num_updates else variance.clone()
        return corrected.add_(eps).sqrt_() if self._eps_inside_sqrt else corrected.sqrt_().add_(eps)

    def step_size(self, flat: Flat, step: int) -> float:
        """The learning rate, over what the momentum lacks in the first steps."""
        lr = float(flat.options["lr"])
        return lr / (1.0 - flat.options["betas"][0] ** step) if self._corrects_bias else lr

    def bound(self, flat: Flat, momentum: Tensor, factor: float = 1.0) -> None:
        """Hold ``momentum`` within ``factor`` times what gives the largest update."""
        if self._max_update:
            largest = self.divisor(flat) * (self._max_update * factor)
            torch.clamp(momentum, largest.neg(), largest, out=momentum)

    def collective_of(self, flat: Flat) -> CompressedAllReduce:
        """The collective with its error buffers, made when it is first needed."""
        if flat.collective is None:
            flat.collective = CompressedAllReduce(
                flat.exp_avg.numel(),
                self._group,
                flat.exp_avg.device,
                segments=flat.sizes if self._unit == "tensor" else None,
                mask=None if self._deepspeed else flat.mask,
                scale=self._scale,  # type: ignore[arg-type]
                counts_padding=self._deepspeed,
            )
        return flat.collective

    def reduce(self, tensors: Sequence[tuple[Flat, Tensor, Sequence[Range]]]) -> Iterable[tuple[Flat, Tensor]]:
        """The 1-bit mean over ranks of each flat tensor of momentum or gradients, in place, except in its ranges that
        are held. Yields each when it is there, while others travel. One rank: only masks act."""
        divides = self._divides and self._group.size > 1
        for flat, tensor, held in tensors:
            if divides:
                tensor.div_(self.divisor(flat))
            self.collective_of(flat).begin(tensor, held)
        for flat, _, _ in tensors:
            self.collective_of(flat).serve()
        for flat, tensor, _ in tensors:
            self.collective_of(flat).finish(tensor)
            if divides:
                tensor.mul_(self.divisor(flat))
            if flat.mask is not None:
                tensor.mul_(flat.mask)
            yield flat, tensor

    # --- state that belongs to a rank --------------------------------------------------------------------------

    def rank_tensors(self, create: bool = False) -> dict[str, Tensor]:
        """The error buffers by name, live; ``create`` makes those that no step has made yet."""
        found = {}
        for flat in self.flats:
            if create and not flat.options.get("non_freeze"):
                self.collective_of(flat)
            if flat.collective is not None and self._group.size > 1:
                found[f"{flat.names[0]}.worker_error"] = flat.collective.worker_error
                found[f"{flat.names[0]}.server_error"] = flat.collective.server_error
        return found

    def state_was_loaded(self) -> None:
        """What was derived from the state before a load is derived anew."""
        for flat in self.flats:
            flat.denominator, flat.extra, flat.is_apart = None, {}, False


def connect(
    optimizers: Iterable[torch.optim.Optimizer],
    reduction: Any,
    holders: Mapping[int, tuple[int, ...]],
    mesh: Mesh,
    ledger: Ledger,
) -> CompressedOptimizer | None:
    """Give the buckets of ``reduction`` to the optimizer that steps on them, if there is one of the 1-bit family.

    ``holders``: see `Stages`.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, CompressedOptimizer):
            stages = Stages(mesh.rank == 0, ShardGroup.of(mesh, "pp", ledger), holders)
            optimizer.connect(reduction, ShardGroup.of(mesh, "dp_replicate", ledger), stages)
            return optimizer
    return None


class Kept:
    """Saves ranges of flat tensors and puts them back: what an update over whole buckets must leave alone."""

    def __init__(self, held: Sequence[Range], *tensors: Tensor) -> None:
        self._saved = [(tensor[a:b], tensor[a:b].clone()) for a, b in held for tensor in tensors]

    def restore(self) -> None:
        for view, values in self._saved:
            view.copy_(values)
