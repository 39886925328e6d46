"""In words: what a load left as it was. Every load prints this; a resume must not pass for more than it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from engine.checkpoint.errors import listing
from engine.checkpoint.loading import LoadedTensors
from engine.checkpoint.manifest import CLIENT_STATE, Manifest
from engine.checkpoint.model_facts import NAME as MODEL_FACTS
from engine.contracts import SavedLayout

WORDS = {
    "optimizer_groups": "the optimizer's state",
    "lr_scheduler": "the learning-rate schedule",
    "data_loader": "the position in the data",
    "random_states": "the random generators",
    "run": "the counters",
}


def describe(
    manifest: Manifest,
    *,
    layout: SavedLayout,
    loaded: LoadedTensors,
    restored_states: Collection[str],
    asked_states: Collection[str] = (),
    client_state_restored: bool = True,
) -> list[str]:
    """One plain sentence for each thing that the load did not restore as it was saved, or could not.

    ``layout`` is the present one; ``loaded`` is what `load_tensors` returned; ``restored_states`` names the `Stateful`s
    that took their state, ``asked_states`` those that wanted one. Empty where everything came back exactly.
    """
    lines = []
    if loaded.missing:
        lines.append(f"Not in the checkpoint, left as initialised: {listing(loaded.missing)}.")
    absent = [name for name in asked_states if name not in manifest.states and name != MODEL_FACTS]
    if absent:
        lines.append(f"Not in the checkpoint, these begin anew: {listing([WORDS.get(name, name) for name in absent])}.")
    sections = Counter(
        name.partition(".")[0]
        for name in manifest.tensors
        if name not in loaded.restored_names and not name.startswith(f"{CLIENT_STATE}.")
    )
    lines += [f"Not restored: {count} saved tensors of {section!r}." for section, count in sorted(sections.items())]
    changes = Counter(loaded.converted.values())
    lines += [f"Converted: {count} tensors from {change}." for change, count in sorted(changes.items())]
    same = manifest.same_ranks(layout)
    for name, state in manifest.states.items():
        if name not in restored_states and name != MODEL_FACTS:
            moved = not same and state.on_layout_change != "reshard"
            why = ": it belongs to the ranks of the layout it was saved under" if moved else ""
            lines.append(f"Not restored: the state of {name!r}{why}.")
    if manifest.encoded_client_state and not client_state_restored:
        lines.append("Not restored: client_state.")
    if manifest.layout.global_batch_size != layout.global_batch_size:
        saved = manifest.layout.global_batch_size
        lines.append(f"The global batch is {layout.global_batch_size} samples; the checkpoint's was {saved}.")
    return lines
