"""`torch.nn.utils.clip_grad_norm_` on an engine's parameters, which cannot clip what the engine has yet to finish.

At stages 0 to 2 there is no ``p.grad`` between backward and step; at stage 3 there are sums, not divided by the ranks
and the loss scale. The call leaves the gradients as they are and says so once.
"""

from __future__ import annotations

import logging

from torch import Tensor

from engine import torch_compat
from engine.full_state.owners import engines

log = logging.getLogger("engine")
_has_warned = False


def watch_clipping() -> None:
    """From now on `clip_grad_norm_` leaves gradients of engines alone, and warns."""
    torch_compat.veto_clipping(_is_an_engines)


def _is_an_engines(gradients: list[Tensor]) -> bool:
    global _has_warned
    for owner in list(engines):
        if not owner.roles.reduction.scales():
            continue  # no window is open: there is nothing that it could mean
        held = {id(p.grad) for p in owner.module.parameters() if p.grad is not None}
        if gradients and not any(id(gradient) in held for gradient in gradients):
            continue
        if not _has_warned:
            _has_warned = True
            log.warning(
                "clip_grad_norm_() has no effect on a model that an engine trains: its gradients are complete only "
                "inside step(), which clips by the config's gradient_clipping; full_gradients() reads them before"
            )
        return True
    return False
