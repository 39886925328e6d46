"""A model of which only the size is known: a GPT of so many parameters, cut into blocks as such models are."""

from __future__ import annotations

from engine.plan.facts import ModelFacts, ParameterFacts
from engine.plan.propose import shape


def imagined_facts(num_parameters: int) -> ModelFacts:
    """One tensor a block, and one for what stands around the blocks; together exactly ``num_parameters``."""
    layers, width = shape(num_parameters)
    block = min(12 * width * width, num_parameters // layers)
    blocks = tuple(f"blocks.{index}" for index in range(layers))
    parameters = [ParameterFacts(f"{name}.weight", (block,), block=at) for at, name in enumerate(blocks)]
    rest = num_parameters - layers * block
    if rest:
        parameters.insert(0, ParameterFacts("embedding.weight", (rest,)))
    facts = ModelFacts.of(parameters, blocks)
    return ModelFacts(**{**vars(facts), "why_not_measured": "only the number of parameters is known (--model-size)"})
