"""What `tensor_parallel.size` must divide, where the model is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.plan.findings import divisors, plural
from engine.plan.plan import Degrees, OptimizerPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.facts import ModelFacts
    from engine.plan.findings import Findings

SIZE = "tensor_parallel.size"


@dataclass(frozen=True)
class SplitSizes:
    """The numbers of a model that tp ranks share. None: not known.

    ``widths``: of the activations between a layer cut by columns and one cut by rows, by what they are called.
    """

    num_heads: int | None = None
    num_key_value_heads: int | None = None
    vocabulary_size: int | None = None
    widths: tuple[tuple[str, int], ...] = ()

    def of_layers(self) -> list[tuple[str, int]]:
        """``(what, number)`` of all that a degree must divide."""
        heads = [("attention heads", self.num_heads)]
        if self.num_key_value_heads != self.num_heads:
            heads.append(("key-value heads", self.num_key_value_heads))
        return [(what, number) for what, number in (*heads, *self.widths) if number is not None]


def fitting_degrees(sizes: SplitSizes, limit: int = 1 << 16) -> list[int]:
    """The tp degrees that divide every number of ``sizes``, ascending."""
    numbers = [number for _, number in sizes.of_layers()]
    if not numbers:
        return []
    return [d for d in divisors(min(numbers)) if d <= limit and all(number % d == 0 for number in numbers)]


def split_problems(sizes: SplitSizes, tp: int) -> list[tuple[str, str]]:
    """``(sentence, repair)`` for each number that ``tp`` ranks cannot share."""
    fitting = fitting_degrees(sizes)
    below = max((degree for degree in fitting if degree < tp), default=None)
    above = min((degree for degree in fitting if degree > tp), default=None)
    near = " or ".join(str(degree) for degree in (below, above) if degree is not None)
    repair = f"set {SIZE} to {near}" if near else ""
    return [
        (f"{tp} ranks cannot share {number:,} {what}: {number} = {number // tp} x {tp} + {number % tp}", repair)
        for what, number in sizes.of_layers()
        if number % tp
    ]


def check_tensor_parallel(config: Config, degrees: Degrees, facts: ModelFacts | None, findings: Findings) -> None:
    """Heads and widths must divide; a vocabulary that does not is cut unevenly, which is told.

    A plan that the JSON writes may leave attention whole, so with one the widths are the proof's affair.
    """
    settings, tp = config.tensor_parallel, degrees.tp
    if settings is None or tp == 1 or facts is None or facts.split_sizes is None:
        return
    sizes = facts.split_sizes
    if not settings.plan and settings.partition_config is None:
        fitting = ", ".join(map(str, fitting_degrees(sizes)))
        for sentence, repair in split_problems(sizes, tp):
            findings.problem(SIZE, sentence, code="ranks", found=tp, allowed=fitting, repair=repair)
    if note := vocabulary_note(sizes, tp):
        findings.note(SIZE, note)


def vocabulary_note(sizes: SplitSizes, tp: int) -> str:
    """What becomes of a vocabulary that ``tp`` does not divide; '' for one that it does."""
    vocabulary = sizes.vocabulary_size
    if vocabulary is None or vocabulary % tp == 0:
        return ""
    part = -(-vocabulary // tp)
    last = vocabulary - part * (tp - 1)
    if last < 1:
        return (
            f"a vocabulary of {vocabulary:,} in parts of {part:,} would leave the last of {tp} ranks none: it is whole"
        )
    return (
        f"a vocabulary of {vocabulary:,} is cut into {plural(tp - 1, 'part')} of {part:,} and a last one of {last:,}; "
        f"nothing is padded (a multiple of {tp} shares the work evenly)"
    )


NEED_WHOLE_MATRICES = ("Muon", "Adafactor")


def cutting_blocks_out(config: Config) -> list[str]:
    """The switches that are on of features by which tokens or blocks are passed by."""
    routing = config.data_efficiency.data_routing if config.data_efficiency else None
    on = {
        "progressive_layer_drop.enabled": config.progressive_layer_drop,
        "data_efficiency.data_routing.random_ltd.enabled": routing.random_ltd if routing else None,
    }
    return [path for path, section in on.items() if section is not None and section.enabled]


def check_pairs(config: Config, degrees: Degrees, optimizer: OptimizerPlan | None, findings: Findings) -> None:
    """What cannot go with layers that are split."""
    if degrees.tp == 1:
        return
    settings = config.tensor_parallel
    if settings is not None and "sequence" in settings.plan.values():
        for path in cutting_blocks_out(config):
            findings.problem(
                "tensor_parallel.plan",
                f'a norm on shards of the sequence ("sequence") needs every block on all tokens, and {path} leaves '
                "blocks or tokens out",
                found="sequence",
                allowed="column, row, vocabulary, replicate",
                repair=f"leave the norms out of the plan, or switch {path} off",
            )
    if optimizer is None:
        return
    why = ""
    if optimizer.type in NEED_WHOLE_MATRICES:
        why = f"{optimizer.type} needs whole matrices for its update, and each of {degrees.tp} tp ranks holds a part"
    elif optimizer.type == "OneBitLamb":
        why = f"OneBitLamb keeps trust ratios of whole tensors on every rank, and {degrees.tp} tp ranks hold parts"
    if why:
        findings.problem(
            "optimizer.type",
            why,
            found=optimizer.type,
            allowed="AdamW, Adam, Lion, Lamb, SGD, OneBitAdam, ZeroOneAdam and others that work element by element",
            repair=f"choose another optimizer, or set {SIZE} to 1",
            options=("AdamW",),
        )
