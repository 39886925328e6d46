"""What ranks run in the tests of the 1-bit optimizers, and the same with the slow optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import engine
from tests.parity.one_bit_oracle import SLOW, SlowOptimizer
from tests.parity.small import Layers, regression_batch, seeded
from tests.parity.toy import part

GLOBAL_BATCH = 12
LR, BETAS = 1e-2, (0.9, 0.99)
KINDS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 4},
    "ZeroOneAdam": {"var_freeze_step": 4, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 2},
    "OneBitLamb": {"freeze_step": 4, "coeff_beta": 0.5},
}
"""Each switches after step 4."""


def config_of(kind: str, params: dict[str, Any], **more: Any) -> dict[str, Any]:
    """``compression_unit`` is the group unless ``params`` say otherwise: the slow optimizers have one flat tensor."""
    defaults = {"lr": LR, "betas": list(BETAS), "compression_unit": "group"}
    return {
        "train_batch_size": GLOBAL_BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "params": {**defaults, **params}},
        "seed": 0,
        **more,
    }


def start(
    config: dict[str, Any], make: Callable[[], nn.Module] = Layers, frozen: tuple[str, ...] = ()
) -> engine.Engine:
    model = seeded(make)
    for name, parameter in model.named_parameters():
        if frozen and name.startswith(frozen):
            parameter.requires_grad_(False)
    return engine.initialize(model=model, config=config)[0]


def inner_of(model_engine: engine.Engine) -> Any:
    assert model_engine.optimizer is not None
    return model_engine.optimizer.inner[0]


def window(model_engine: engine.Engine, step: int) -> None:
    accumulation = model_engine.gradient_accumulation_steps()
    for micro in range(accumulation):
        index = micro * model_engine.mesh.dp_size + model_engine.mesh.dp_rank
        batch = part(regression_batch(step), index, accumulation * model_engine.mesh.dp_size)
        model_engine.backward(model_engine(**batch))
        model_engine.step()


def values_of(model_engine: engine.Engine) -> dict[str, Tensor]:
    """Masters by name."""
    return {s.info.name: s.parameter.detach().clone() for s in model_engine.roles.reduction.shards}


def state_of(model_engine: engine.Engine) -> dict[str, dict[str, Tensor]]:
    assert model_engine.optimizer is not None
    named = model_engine.optimizer.named_state()
    return {name: {key: value.clone() for key, value in state.items()} for name, state in named.items()}


def train(config: dict[str, Any], steps: int, frozen: tuple[str, ...] = (), exact: bool = False) -> dict[str, Any]:
    """A run on this rank: parameters, norms and bytes after every step. ``exact``: the mean in place of its signs."""
    model_engine = start(config, frozen=frozen)
    inner: Any = model_engine.optimizer.inner[0]  # type: ignore[union-attr]
    if exact:
        inner.reduce = exactly(model_engine, inner)
    history: dict[str, list[Any]] = {
        "values": [],
        "norms": [],
        "bytes": [],
        "scalars": [],
        "applied": [],
        "moments": [],
    }
    for step in range(steps):
        window(model_engine, step)
        report = model_engine.last_report
        assert report is not None
        history["values"].append(values_of(model_engine))
        history["norms"].append(report.grad_norm)
        history["bytes"].append(report.bytes_by_axis.get("dp_replicate", 0))
        history["scalars"].append(dict(report.scalars))
        history["moments"].append({name: state["exp_avg"] for name, state in state_of(model_engine).items()})
    coefficients = inner.get_lamb_coeffs() if hasattr(inner, "get_lamb_coeffs") else None
    result = {**history, "state": state_of(model_engine), "coefficients": coefficients}
    model_engine.destroy()
    return result


def train_each(configs: dict[str, dict[str, Any]], steps: int) -> dict[str, dict[str, Any]]:
    return {case: train(config, steps) for case, config in configs.items()}


def exactly(model_engine: engine.Engine, inner: Any) -> Callable[..., Any]:
    def reduce(tensors: Any) -> Any:
        for flat, tensor, _ in tensors:
            inner._group.all_reduce(tensor).wait()
            tensor.div_(inner._group.size)
            yield flat, tensor

    return reduce


class SlowRun:
    """The run of ``train`` with a slow optimizer. ``norms``: as the engine reports them."""

    def __init__(
        self, kind: str, num_ranks: int, options: dict[str, Any], clip: float = 0.0, accumulation: int = 1
    ) -> None:
        self.models = [seeded(Layers).double() for _ in range(num_ranks)]
        self.names = [name for name, _ in self.models[0].named_parameters()][::-1]
        self.num_ranks, self.clip, self.accumulation = num_ranks, clip, accumulation
        initial = self.flat(self.models[0])
        sizes = [dict(self.models[0].named_parameters())[name].numel() for name in self.names]
        self.optimizer: SlowOptimizer = SLOW[kind](
            initial, sizes, num_ranks, LR, BETAS, wd=options.get("weight_decay", 0.0), options=options
        )
        self.norms: list[float] = []

    def flat(self, model: nn.Module) -> Tensor:
        parameters = dict(model.named_parameters())
        return torch.cat([parameters[name].detach().flatten() for name in self.names])

    def gradients(self, step: int, local: bool) -> list[Tensor]:
        """Of each rank, clipped; ``local``: the norm is the root of the mean of the ranks' squares."""
        found = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            num_parts = self.accumulation * self.num_ranks
            for micro in range(self.accumulation):
                batch = part(regression_batch(step), micro * self.num_ranks + rank, num_parts)
                loss = model(**{key: value.double() for key, value in batch.items()})
                (loss / self.accumulation).backward()
            parameters = dict(model.named_parameters())
            found.append(torch.cat([parameters[name].grad.flatten() for name in self.names]))  # type: ignore[union-attr]
        stacked = torch.stack(found)
        norm = stacked.square().sum(1).mean().sqrt() if local else stacked.mean(0).norm()
        self.norms.append(norm.item())
        factor = min(1.0, self.clip / (norm.item() + 1e-6)) if self.clip else 1.0
        return [g * factor for g in found]

    def run(self, steps: int, is_local: Callable[[int], bool]) -> list[list[dict[str, Tensor]]]:
        """Parameters by step, then rank, then name. ``is_local(t)``: gradients of step t (from 1) stay local."""
        history = []
        for step in range(steps):
            self.optimizer.step(self.gradients(step, is_local(step + 1)))
            history.append([self.write(model, p) for model, p in zip(self.models, self.optimizer.p, strict=True)])
        return history

    @torch.no_grad()
    def write(self, model: nn.Module, flat: Tensor) -> dict[str, Tensor]:
        parameters, offset = dict(model.named_parameters()), 0
        for name in self.names:
            parameter = parameters[name]
            parameter.copy_(flat[offset : offset + parameter.numel()].view_as(parameter))
            offset += parameter.numel()
        return {name: parameters[name].detach().clone() for name in self.names}


def distance(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert values.keys() == expected.keys()
    return max((values[name].double() - expected[name].double()).abs().max().item() for name in values)


def is_finite(values: dict[str, Tensor]) -> bool:
    return all(math.isfinite(value.abs().sum().item()) for value in values.values())
