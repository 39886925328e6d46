"""The only place for private torch names, each with the reason and what would make it go. Right for torch 2.11 to 2.13."""

from __future__ import annotations

from collections.abc import Callable

import torch


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass now running is over.

    DistributedDataParallel and FSDP2 use the same engine call; autograd offers no public
    end-of-backward hook; this goes when it does.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


# The multi-tensor kernels that torch.optim is built on: one launch for a list of tensors. They have no public spelling
# (https://pytorch.org/docs/stable/torch.html#foreach-operations lists them under these names).
foreach_add_ = torch._foreach_add_
foreach_addcdiv_ = torch._foreach_addcdiv_
foreach_addcmul_ = torch._foreach_addcmul_
foreach_div = torch._foreach_div
foreach_div_ = torch._foreach_div_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sign_ = torch._foreach_sign_
foreach_sqrt_ = torch._foreach_sqrt_


def unscales_in_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.step()`` divides the gradients by ``optimizer.grad_scale`` inside its own kernel.

    The mark that torch.amp.GradScaler looks for on fused optimizers; goes when torch documents one.
    """
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
