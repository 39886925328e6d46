"""The facts of the model that a config names, read without memory for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.cli.prepare import base_of
from engine.cli.target import bind_arguments, build_model, load_target
from engine.contracts import EngineError, LossSum

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engine.config import Config
    from engine.plan import ModelFacts, Plan


def facts_of_target(config: Config, plan: Plan, advance: Callable[[], object] = lambda: None) -> ModelFacts:
    """Of ``model.target``, run on one micro-batch of ``data.sequence_length`` tokens as `ptrain` would feed it.

    ``advance`` is called when torch is there and when the model is known. Raises EngineError for a model that cannot be
    built without memory, or not at all.
    """
    import torch

    from engine.data.batch import loss_with_batch
    from engine.model.describe import describe_model

    advance()
    assert config.model is not None
    target = load_target(str(config.model.target), base_of(config))
    arguments = config.model.args
    bind_arguments(target, arguments)
    samples, length = plan.batch.micro_batch_size, config.data.sequence_length

    def build() -> nn.Module:
        try:
            model: nn.Module = build_model(target, arguments)
        except EngineError as error:
            raise EngineError(f"{error} (ptrain plan builds it without memory; --no-model leaves it aside)") from error
        return model

    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(samples, length, dtype=torch.int64)
        batch: Any = {"input_ids": tokens, "labels": tokens.clone()}
        own = getattr(model, "loss_fn", None)
        loss = loss_with_batch(model, batch if own is None else (tokens, tokens.clone()), own, tokens.device)
        return loss.total if isinstance(loss, LossSum) else loss

    facts = describe_model(build, plan, loss_of, length)
    advance()
    return facts
