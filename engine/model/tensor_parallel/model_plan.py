"""A model's own plan, as transformers' models carry one (``model.tp_plan``, ``config.base_model_tp_plan``): read into
this engine's words. https://huggingface.co/docs/transformers/main/perf_infer_gpu_multi
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from engine.config.messages import EngineError
from engine.model.tensor_parallel.matrices import matrix_of
from engine.model.tensor_parallel.split import Split
from engine.model.tensor_parallel.written import Modules, Written, cut_as, numberless, some, why_not

STYLES: dict[str, tuple[str, dict[str, bool]]] = {
    "colwise": ("column", {}),
    "local_colwise": ("column", {}),
    "colwise_rep": ("column", {"gather_output": True}),
    "colwise_gather_output": ("column", {"gather_output": True}),
    "packed_colwise": ("column", {}),
    "rowwise": ("row", {}),
    "local_rowwise": ("row", {}),
    "rowwise_rep": ("row", {"split_input": True}),
    "rowwise_split_input": ("row", {"split_input": True}),
    "embedding_rowwise": ("vocabulary", {}),
}
"""Style of transformers -> ours, and what else it says."""

WHOLE = frozenset({"replicate", "replicated", "replicated_with_grad_allreduce", "auto"})
"""Nothing is cut. Which gradients come out in parts is found by the proof."""

MEANINGLESS = {
    "embedding_colwise": "cuts an embedding by its width; here embeddings are cut by their rows",
    "packed_rowwise": "cuts a fused weight along its inputs",
    "local_packed_rowwise": "cuts a fused weight along its inputs",
    "moe_tp_experts": "cuts the experts of a mixture, which are no linear layers",
    "grouped_gemm": "spreads experts over ranks",
    "ep_dispatch_experts": "spreads experts over ranks",
    "ep_router": "spreads experts over ranks",
    "moe_identity_expert": "belongs to cut experts",
    "mla_kv_a_proj": "splits a latent key and value, of which a part skips the layer that follows",
    "sequence_parallel": "works on a shard of the sequence",
    "all_reduce": "sums a module whose parts were cut by hand",
    "gather": "gathers a module whose parts were cut by hand",
    "local": "keeps a module whose parts were cut by hand",
    "local_params": "cuts parameters that are in no linear layer",
}
"""Styles that have no counterpart, each with what it does."""


def own_plan(model: nn.Module) -> dict[str, str]:
    """Pattern (``*`` is a block's number) -> style of transformers; {} for a model without a plan.

    A module that wraps models with plans has them all.
    """
    found: dict[str, str] = {}
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in outer):
            continue
        if plan := _plan_of(module):
            prefix = f"{name}." if name else ""
            outer.append(prefix)
            found |= {f"{prefix}{key}": style for key, style in plan.items()}
    return found


def _plan_of(model: nn.Module) -> dict[str, str]:
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    found: dict[str, Any] = dict(plan) if isinstance(plan, Mapping) else {}
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    prefix = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    if isinstance(base, Mapping) and not any(key.startswith(inner) for key in found if inner) and (inner or not found):
        found |= {f"{inner}{key}": style for key, style in base.items()}
    return {key: str(style) for key, style in found.items()}


def read_model_plan(model: nn.Module, plan: Mapping[str, str]) -> Written:
    """Translate ``plan`` for the modules of ``model``. Entries that match nothing are noted: a family's plan names
    layers that a configuration of it may lack.

    Raises EngineError with every style that has no meaning here and module that cannot be cut so.
    """
    modules = Modules(model)
    splits: dict[str, Split] = {}
    problems: list[str] = []
    unmatched: list[str] = []
    by_number: dict[str, list[str]] = {}
    for name, first in modules.first.items():
        by_number.setdefault(numberless(name), []).append(first)
    parameters = {numberless(name) for name, _ in model.named_parameters()}
    for pattern, style in plan.items():
        names = list(dict.fromkeys(by_number.get(numberless(pattern), ())))
        if not names and numberless(pattern) not in parameters:
            unmatched.append(pattern)
        elif style in MEANINGLESS or (not names and style not in WHOLE):
            why = MEANINGLESS.get(style, "is given to a parameter that is in no linear layer")
            problems.append(f"{pattern}: {style!r} {why}")
        elif style in STYLES:
            unfit = [name for name in names if (split := _split(modules[name], style)) is None]
            splits |= {name: split for name in names if (split := _split(modules[name], style)) is not None}
            if unfit:
                problems.append(f"{pattern}: {some(unfit)} {why_not(modules[unfit[0]], STYLES[style][0])}")
        elif style not in WHOLE:
            problems.append(f"{pattern}: the style {style!r} is not known here")
    if problems:
        raise EngineError(
            f"tensor_parallel: the plan that {type(model).__name__} brings along (model.tp_plan) cannot be used:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + '\nwrite "tensor_parallel.plan" for the layers that are to be cut; what it does not name stays whole'
        )
    notes = (f"the model's plan names {some(unmatched, 4)}, which it has not",) if unmatched else ()
    return Written(splits, "model", notes=notes)


def _split(module: nn.Module, style: str) -> Split | None:
    ours, more = STYLES[style]
    split = cut_as(module, ours)
    matrix = matrix_of(module)
    if split is None or matrix is None:
        return split
    segments = (matrix.num_outputs // 2,) * 2 if style == "packed_colwise" else ()
    return Split(split.style, segments, split.transposed, **more)
