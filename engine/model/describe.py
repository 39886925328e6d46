"""`describe_model`: a model as the plan knows it, built and run once on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.messages import EngineError, in_one_line
from engine.model.blocks import find_blocks
from engine.model.facts import read_facts, with_cuts
from engine.model.imagined_splits import cut_dimensions, imagined_splits
from engine.model.measure import measure_forward
from engine.model.pipeline.layers import find_layers, layered_facts
from engine.model.pipeline.reach import uncuttable
from engine.model.tensor_parallel.find import given_plan, heads_must_divide
from engine.model.tensor_parallel.given import own_tensor_plan
from engine.model.tensor_parallel.matrices import matrix_of
from engine.model.tensor_parallel.refusal import nothing_to_cut
from engine.model.tensor_parallel.sizes import split_sizes
from engine.model.tensor_parallel.split import Split
from engine.model.tensor_parallel.written import Written
from engine.model.zero import autocast, cast_buffers
from engine.model.zero.layout import compute_dtype
from engine.plan import ModelFacts, Plan
from engine.plan.tensor_parallel import SplitSizes
from engine.torch_compat import fake_tensors


def describe_model(
    build: Callable[[], nn.Module],
    plan: Plan,
    loss_of: Callable[[nn.Module], Tensor] | None = None,
    sequence_length: int = 1,
) -> ModelFacts:
    """Needs no memory for parameters or activations, and no ranks.

    Args:
        build: makes the model. It runs under torch's fake tensors: what it allocates has a shape and no values.
        loss_of: runs one micro-batch of ``plan.batch.micro_batch_size`` samples through the model and returns the loss
            (0-dim); it makes its inputs itself. None leaves activations and FLOPs unknown, as does a model that cannot
            run without values; the record says why.

    Raises EngineError for a model that cannot be built without values.
    """
    with fake_tensors():
        try:
            model = build()
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"the model cannot be built without memory: {in_one_line(error)}") from error
        blocks, layers = find_blocks(model, plan.block_path), None
        if plan.pipeline is not None:
            layers = find_layers(model, blocks, plan.block_path, loss_of)
            blocks = layers.modules
        facts = read_facts(model, blocks) if layers is None else layered_facts(model, layers)
        _cast(model, plan)
        model.train()
        samples = plan.batch.micro_batch_size
        splits: dict[str, Split] = {}
        try:
            with autocast(plan.precision, torch.device("cpu"))():
                if plan.degrees.tp > 1:
                    splits, sizes = _splits(build(), plan, loss_of)
                    facts = with_cuts(replace(facts, split_sizes=sizes), cut_dimensions(model, splits))
                if loss_of is None:
                    return replace(facts, why_not_measured="there is no batch to run the model on")
                styles = {name: split.style for name, split in splits.items()}
                wrong: list[tuple[int, str]] = []

                def look(loss: Tensor, outputs: Sequence[Any]) -> None:
                    assert layers is not None
                    wrong[:] = uncuttable(model, layers, dict(facts.ends), loss, outputs)

                on_graph = None if layers is None else look
                forward = measure_forward(model, blocks, loss_of, samples, sequence_length, styles, on_graph=on_graph)
        except EngineError:
            raise
        except Exception as error:
            return replace(facts, why_not_measured=f"the model cannot run without values ({in_one_line(error)})")
    return replace(facts, forward=forward, uncuttable=tuple(wrong))


def _cast(model: nn.Module, plan: Plan) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute_dtype(parameter.dtype, plan.precision))
    cast_buffers(model, plan.precision)


def _splits(
    model: nn.Module, plan: Plan, loss_of: Callable[[nn.Module], Tensor] | None
) -> tuple[dict[str, Split], SplitSizes]:
    """How a copy of the model is cut, which finding that changes, and the numbers that ranks must share then.

    Raises EngineError for a written plan that does not fit the model, and where there is nothing to cut.
    """
    settings = plan.config.tensor_parallel
    own = own_tensor_plan(model, settings)
    given = Written(own.splits, "model") if own else given_plan(model, settings, plan.config.locate)
    blocks = find_blocks(model, plan.block_path)
    sizes = split_sizes(model, blocks)
    if own or not heads_must_divide(model, given):
        sizes = SplitSizes(vocabulary_size=sizes.vocabulary_size)
    _cast(model, plan)
    splits = imagined_splits(model, blocks, given, loss_of)
    has_layers = any(matrix_of(module) or isinstance(module, nn.Embedding) for module in model.modules())
    if not splits and not (has_layers and given is None and (loss_of is None or not blocks)):
        raise EngineError(nothing_to_cut(model, ()))
    return splits, sizes
