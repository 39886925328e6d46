"""Where the repeated blocks of a model are: the one fact about it that every transform reads."""

from __future__ import annotations

from torch import nn

from engine.config.messages import EngineError


def find_blocks(model: nn.Module, path: str | None = None) -> list[nn.Module]:
    """The repeated blocks in execution order; [] for a model that has none.

    ``path`` (config ``model.blocks``) names the container. Without it: Hugging Face's ``_no_split_modules`` classes
    decide where there are any; else the `ModuleList` or `Sequential` that holds the most parameters in at least two
    modules of one class.

    Raises EngineError if ``path`` does not name a container of modules.
    """
    if path is not None:
        try:
            container = model.get_submodule(path)
        except AttributeError:
            known = ", ".join(name for name, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential))
            raise EngineError(
                f"model.blocks: the model has no module {path!r}; containers are: {known or 'none'}"
            ) from None
        blocks = list(dict.fromkeys(container.children()))
        if not blocks:
            raise EngineError(f"model.blocks: {path!r} is a {type(container).__name__} without modules inside")
        return blocks

    hinted = set(getattr(model, "_no_split_modules", None) or ())
    best: list[nn.Module] = []
    best_numel = 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(dict.fromkeys(module))  # a block that is used several times is one block
        kinds = {type(child) for child in children}
        if len(children) < 2 or len(kinds) != 1:
            continue
        numel = sum(p.numel() for p in module.parameters())
        if hinted and next(iter(kinds)).__name__ in hinted:
            numel += 1 << 62  # a hint outweighs any size
        if numel > best_numel:
            best, best_numel = children, numel
    return best
