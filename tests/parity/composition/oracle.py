"""What a cell's run must give: one process, no engine, every feature written out where it acts.

Of the engine it uses the streams of random numbers, by which gates and kept tokens are drawn, and Lamb. The 1-bit
optimizers are the slow ones, with the mean in place of its signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.optim.lamb import Lamb
from tests.parity.composition.features import (
    CLIP,
    GLOBAL_BATCH,
    LR,
    NUM_BLOCKS,
    SEQUENCE_LENGTH,
    Cell,
)
from tests.parity.composition.model import batch_of, model_of
from tests.parity.layer_drop_oracle import Drop, gated_loss
from tests.parity.one_bit_oracle import SLOW, SlowOptimizer
from tests.parity.token_drop_oracle import gpt_block, kept
from tests.parity.toy import DTYPES, Result, part

# By the steps applied before.
LENGTHS = (8, 8, 12, 12, 16, 16)
PIECES = (8, 8, 8, 8, 16, 16)
KEPT_TOKENS = (4, 4, 8, 8, 12, 16)
DROP = Drop(theta=0.3, gamma=0.5)
BETAS = (0.9, 0.99)
Batch = dict[str, Tensor]


def oracle(cell: Cell, batches: Sequence[Sequence[Batch]] | None = None) -> Result:
    """``batches``: of each step, in the order of its parts: part i is micro-batch i // dp of rank i % dp."""
    model = model_of(cell)
    names = dict(model.named_parameters())
    trained = {name: p for name, p in names.items() if p.requires_grad}
    masters = {name: p.detach().float().clone() for name, p in trained.items()}
    for p in names.values():
        p.data = p.data.to(DTYPES[cell.precision])
    ranks = Ranks(cell, masters)
    result, applied = Result(), 0
    for step in range(cell.steps):
        losses = []
        totals: list[dict[str, Tensor]] = [{} for _ in range(cell.dp)]
        for index in range(cell.num_parts):
            rank = index % cell.dp
            for name, p in trained.items():
                p.data.copy_(ranks.values(rank)[name])
            batch = batches[step][index] if batches else part(batch_of(step), index, cell.num_parts)
            loss = loss_of(cell, model, batch, step, index, applied)
            (loss / cell.accumulation).backward()
            losses.append(loss.item())
            for name, p in trained.items():
                if p.grad is not None:
                    totals[rank][name] = totals[rank].get(name, torch.zeros(())) + p.grad.float()
                    p.grad = None
        result.losses.append(sum(losses) / cell.num_parts)
        if cell.overflows(step):
            result.norms.append(math.nan)
            continue
        result.norms.append(ranks.step(totals, applied))
        applied += 1
    result.parameters = {name: value.clone() for name, value in ranks.values(0).items()}
    result.parameters |= {name: p.detach().float() for name, p in names.items() if name not in masters}
    return result


def loss_of(cell: Cell, model: Any, batch: Batch, step: int, index: int, applied: int) -> Tensor:
    if cell.has("truncates"):
        batch = {name: rows[:, : LENGTHS[applied]] for name, rows in batch.items()}
    if cell.has("reshapes"):
        batch = {name: rows.reshape(-1, PIECES[applied]) for name, rows in batch.items()}
    gates = [(True, 1.0)] * NUM_BLOCKS
    if cell.has("drops layers"):
        micro = index // cell.dp
        gates = [DROP.gate(step, micro, layer, NUM_BLOCKS, applied) for layer in range(1, NUM_BLOCKS + 1)]
    pieces = SEQUENCE_LENGTH // PIECES[applied] if cell.has("reshapes") else 1
    first_sample = index * GLOBAL_BATCH // cell.num_parts

    def block_of(block: nn.Module, x: Tensor, layer: int) -> Tensor:
        if not cell.has("drops tokens") or layer in (1, NUM_BLOCKS):
            return block(x)
        rows = []
        for row in range(len(x)):
            sample, piece = divmod(row, pieces)
            number = min(KEPT_TOKENS[applied], x.shape[1])
            positions = kept(0, step, layer - 1, first_sample + sample, x.shape[1], number, piece)
            computed = dict(zip(positions, gpt_block(block, x[row], positions), strict=True))
            rows.append(torch.stack([computed.get(at, x[row, at]) for at in range(x.shape[1])]))
        return torch.stack(rows)

    return gated_loss(model, batch, gates, block_of)


class Ranks:
    """The fp32 masters, of every data-parallel rank where those may differ, and their optimizer."""

    def __init__(self, cell: Cell, masters: dict[str, Tensor]) -> None:
        self.cell = cell
        self.clip = CLIP if any(feature.key == "clipping" for feature in cell.features) else 0.0
        self.decays = any(feature.key == "schedule" for feature in cell.features)
        kind, params = cell.optimizer["type"], dict(cell.optimizer["params"])
        self.slow: dict[str, SlowOptimizer] = {}
        self.masters: dict[str, nn.Parameter] = {}
        if cell.is_one_bit:
            for name, value in masters.items():
                self.slow[name] = SLOWEST[kind](
                    value.flatten(), [value.numel()], cell.dp, LR, BETAS, params["eps"], params["weight_decay"],
                    {**params, "exact": True},
                )  # fmt: skip
            self.shapes = {name: value.shape for name, value in masters.items()}
            return
        self.masters = {name: nn.Parameter(value.clone()) for name, value in masters.items()}
        self.optimizers = plain_optimizers(kind, params, self.masters)

    def values(self, rank: int) -> dict[str, Tensor]:
        if self.slow:
            return {name: slow.p[rank].view(self.shapes[name]).float() for name, slow in self.slow.items()}
        return {name: p.detach() for name, p in self.masters.items()}

    def step(self, totals: list[dict[str, Tensor]], applied: int) -> float:
        """``totals``: gradients by rank and name, without those that no part has. Returns the norm before clipping."""
        there = set().union(*totals)
        means = {name: sum((total[name] for total in totals), torch.zeros(())) / self.cell.dp for name in there}
        norm = _norm(means.values())
        if self.slow and next(iter(self.slow.values())).stays_local(applied + 1):  # type: ignore[attr-defined]
            norm = math.sqrt(sum(_norm(total.values()) ** 2 for total in totals) / self.cell.dp)
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        lr = 0.5 ** (applied // 2) if self.decays else 1.0
        if self.slow:
            for name, slow in self.slow.items():
                slow.lr, slow.t = LR * lr, applied
                gradients = [total[name].flatten() * factor for total in totals] if name in there else None
                slow.step_or_pass(gradients)  # type: ignore[attr-defined]
            return norm
        for name, p in self.masters.items():
            p.grad = means[name] * factor if name in there else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR * lr
            optimizer.step()
        return norm


def _norm(gradients: Any) -> float:
    return torch.cat([g.double().flatten() for g in gradients]).norm().item()


def plain_optimizers(
    kind: str, params: dict[str, Any], masters: dict[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    if kind == "Muon":
        hidden = [p for name, p in masters.items() if p.ndim == 2 and "embedding" not in name]
        rest = [p for p in masters.values() if all(p is not h for h in hidden)]
        decay = params["weight_decay"]
        return [
            torch.optim.Muon(hidden, lr=LR, weight_decay=decay, momentum=0.95, adjust_lr_fn="original"),
            torch.optim.AdamW(rest, lr=LR, weight_decay=decay, betas=BETAS, eps=params["eps"]),
        ]
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    if kind == "Lamb":
        return [Lamb(masters.values(), **params, max_coeff=10.0, min_coeff=0.01)]
    return [getattr(torch.optim, kind)(masters.values(), **params)]


# --- the slow 1-bit optimizers, one a parameter, which may be left out of a step -----------------------------------


class _LeftOut(SlowOptimizer):
    """A parameter that no rank has a gradient of keeps its value and its moments; counters go on."""

    kept: Sequence[str] = ("p", "m", "v", "fresh", "average", "last", "u", "start", "length")

    def step_or_pass(self, gradients: list[Tensor] | None) -> None:
        before = {key: _copied(getattr(self, key)) for key in self.kept if hasattr(self, key)}
        self.step(gradients or [torch.zeros_like(p) for p in self.p])
        if gradients is None:
            for key, value in before.items():
                setattr(self, key, value)

    def stays_local(self, step: int) -> bool:
        return step > self.options["freeze_step"]


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


class _Adam(_LeftOut, SLOW["OneBitAdam"]):  # type: ignore[misc]
    pass


class _Lamb(_LeftOut, SLOW["OneBitLamb"]):  # type: ignore[misc]
    def step_or_pass(self, gradients: list[Tensor] | None) -> None:
        super().step_or_pass(gradients)
        if gradients is None and not hasattr(self, "fresh"):
            return
        if gradients is None and self.t == self.options["freeze_step"] + 1:
            self.fresh = self.v.clone()
            self.average = [average or 1.0 for average in self.average]


class _ZeroOne(_LeftOut, SLOW["ZeroOneAdam"]):  # type: ignore[misc]
    def stays_local(self, step: int) -> bool:
        return step > self.options["var_freeze_step"] or step % self.iv != 0

    def step_or_pass(self, gradients: list[Tensor] | None) -> None:
        if gradients is not None or self.t + 1 <= self.options["var_freeze_step"]:
            super().step_or_pass(gradients)
            return
        self.t += 1
        if self.t % self.li == 0 and self.start is not None:
            w = self.mean([u * self.divisor() for u in self.u])
            self.m = [-w / self.length] * self.num_ranks
            self.p = [self.start + w / self.divisor()] * self.num_ranks
            self.start = None
        self.n += 1
        if self.n == self.options["local_step_scaler"]:
            self.n, self.li = 0, min(self.options["local_step_clipper"], 2 * self.li)


SLOWEST: dict[str, Callable[..., SlowOptimizer]] = {"OneBitAdam": _Adam, "ZeroOneAdam": _ZeroOne, "OneBitLamb": _Lamb}
