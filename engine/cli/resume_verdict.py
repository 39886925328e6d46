"""Compare the traces of a run that stopped with those of one that did not: the first difference, and its cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.checkpoint.errors import listing

Line = Mapping[str, Any]


def first_difference(straight: Sequence[Sequence[Line]], parts: Sequence[Sequence[Sequence[Line]]]) -> str | None:
    """Why the stopped run is not the straight one; None where they are equal to the bit.

    ``straight[rank]``: the lines of engine/cli/resume_trace.py; ``parts[part][rank]``: those of each part between two
    stops. The earliest step over all ranks is told.
    """
    found: list[tuple[int, int, str]] = []
    for rank, whole in enumerate(straight):
        expected = {line["step"]: line for line in whole}
        for index, part in enumerate(parts):
            difference = _of_part(expected, part[rank], resumed=index > 0)
            if difference is not None:
                begun = f"resumed at step {part[rank][0]['step']}" if index > 0 else "before any stop"
                found.append((difference[0], rank, f"({begun}): {difference[1]}"))
                break
    if not found:
        return None
    step, rank, cause = min(found)
    return f"step {step}{f', rank {rank}' if len(straight) > 1 else ''} {cause}"


def _of_part(expected: Mapping[int, Line], part: Sequence[Line], resumed: bool) -> tuple[int, str] | None:
    first, said = part[0], part[0]["said"]
    if resumed:
        whole = expected[first["step"]]
        for what, kind in (("parameters", ""), ("moments", "the optimizer's state of ")):
            names = _differing(whole[what], first[what])
            if names:
                return first[
                    "step"
                ], f"right after loading, {kind}{listing(names, 3)} is not what was saved{_said(said)}"
        if first["lr"] != whole["lr"]:
            rates = f"{first['lr'][0]:.6g} instead of {whole['lr'][0]:.6g}"
            return first["step"], f"right after loading, the learning rate is {rates}{_said(said)}"
    for line in part[1:]:
        cause = _of_step(expected[line["step"]], line, first if resumed else None, expected, said)
        if cause is not None:
            return line["step"], cause
    return None


def _of_step(
    whole: Line, line: Line, loaded: Line | None, expected: Mapping[int, Line], said: Sequence[str]
) -> str | None:
    """What differs in one step, in the order in which one thing leads to another."""
    lost = _lost(expected, loaded) if loaded is not None else ""
    if [batch["batch"] for batch in line["data"]] != [batch["batch"] for batch in whole["data"]]:
        return _of_data(whole, line, lost, loaded is not None)
    if line["loss"] != whole["loss"]:
        if loaded is None:
            return (
                "the loss differs on the same data: the model is not deterministic. Seed what draws in it from torch's "
                "global generator, and look for kernels that are not (torch.use_deterministic_algorithms)"
            )
        return (
            f"the loss differs on the same data: the model has state that is not in the checkpoint{lost}{_said(said)}"
        )
    names = _differing(whole["parameters"], line["parameters"])
    if line["lr"] != whole["lr"]:
        values = f"{line['lr'][0]:.6g} instead of {whole['lr'][0]:.6g}"
        moved = f"; the first parameter that differs is {names[0]}" if names else ""
        return f"the learning rate is {values}: the schedule is not in the checkpoint{lost}{moved}{_said(said)}"
    if line["loss_scale"] != whole["loss_scale"]:
        return f"the loss scale is {line['loss_scale']:g} instead of {whole['loss_scale']:g}{_said(said)}"
    if names:
        return (
            f"{listing(names, 3)} differs after the step, with the same data, loss and learning rate: gradients or the "
            f"optimizer are not deterministic, or the optimizer has state that is not in the checkpoint{_said(said)}"
        )
    moments = _differing(whole["moments"], line["moments"])
    if moments:
        return f"the optimizer's state of {listing(moments, 3)} differs after the step{_said(said)}"
    return None


def _of_data(whole: Line, line: Line, lost: str, resumed: bool) -> str:
    here, there = ([sample for batch in one["data"] for sample in batch["samples"]] for one in (line, whole))
    if sorted(here) == sorted(there):
        return f"the same samples come in another order: the order of the data is not deterministic{lost}"
    if not resumed:
        return (
            "the data differ although nothing was stopped yet: the dataset draws from a generator that is not seeded "
            "(random augmentation, say). Draw from the global generators of torch, NumPy or Python, which are seeded"
        )
    same = len(set(here) & set(there))
    return (
        f"the data differ ({same} of {len(there)} samples of this rank's step are the same): the dataset has state of "
        f"its own that is not in the checkpoint (a generator, a position){lost}"
    )


def _lost(expected: Mapping[int, Line], loaded: Line) -> str:
    """The attributes that were not what they had been when the checkpoint was saved."""
    whole = expected[loaded["step"]]
    names = [
        f"{name} of {owner}"
        for owner, held in loaded["attributes"].items()
        for name in _differing(whole["attributes"].get(owner, {}), held)
    ]
    return f"; not restored: {listing(names, 5)}" if names else ""


def _differing(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    return [name for name in {**expected, **found} if expected.get(name) != found.get(name)]


def _said(said: Sequence[str]) -> str:
    return f". Loading said: {' '.join(said)}" if said else ""
