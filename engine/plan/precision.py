"""Dtypes and loss scaling: `fp16`, `bf16`, `torch_autocast`, `data_types`, `communication_data_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.plan.plan import Dtype, LossScalePlan, PrecisionPlan

if TYPE_CHECKING:
    from engine.config import Config
    from engine.plan.findings import Findings

ACCUMULATION_DTYPES: dict[Dtype, tuple[Dtype, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("bf16", "fp32"),
    "fp16": ("fp16", "fp32"),
}
"""Which dtypes gradients may be accumulated in, by the dtype of the parameters."""


def resolve_precision(config: Config, findings: Findings) -> PrecisionPlan:
    compute = _compute_dtype(config, findings)
    autocast = _autocast_dtype(config, compute, findings)
    _check_parameter_dtype(config, compute, findings)
    _note_wide_gradients(config, compute, findings)
    return PrecisionPlan(
        compute=compute,
        autocast=autocast,
        accumulate=_accumulation_dtype(config, compute, findings),
        reduce=_reduction_dtype(config, compute, findings),
        buffers=config.data_types.buffer_dtype,
        loss_scale=_loss_scale(config, compute, autocast, findings),
        check_overflow=_check_overflow(config, compute, findings),
    )


def _compute_dtype(config: Config, findings: Findings) -> Dtype:
    if config.fp16.enabled and config.bf16.enabled:
        findings.problem(
            "bf16.enabled",
            f"bf16 and fp16 ({findings.source('fp16.enabled')}) are both on; a model computes in one dtype",
            found=True,
            allowed="one of the two",
            repair="switch off the one you do not want",
        )
        return "bf16"
    compute: Dtype = "fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32"
    if compute == "fp32":
        findings.resolved("data_types.param_dtype", compute, "neither bf16 nor fp16 is on", "derived")
    else:
        findings.resolved("data_types.param_dtype", compute, f"{compute}.enabled is true", "derived")
    return compute


def _autocast_dtype(config: Config, compute: Dtype, findings: Findings) -> Dtype | None:
    autocast = config.torch_autocast
    if not autocast.enabled:
        return None
    if compute != "fp32":
        findings.problem(
            "torch_autocast.enabled",
            f"torch_autocast casts an fp32 model, but {compute} ({findings.source(compute + '.enabled')}) "
            "already turns the whole model",
            found=True,
            repair=f"switch off {compute} or torch_autocast",
            options=("false",),
        )
    path = "torch_autocast.dtype"
    if autocast.dtype is None:
        findings.note(path, "torch_autocast without a dtype computes in bf16")
        return findings.resolved(path, "bf16", "bf16 needs no loss scaling", "default")
    return findings.resolved(path, autocast.dtype)


def _check_parameter_dtype(config: Config, compute: Dtype, findings: Findings) -> None:
    path = "data_types.param_dtype"
    dtype = config.data_types.param_dtype
    if dtype is not None and dtype != compute:
        switch = f"{dtype}.enabled to true" if dtype != "fp32" else f"{compute}.enabled to false"
        findings.problem(
            path,
            f"is {dtype}, but the model computes in {compute}",
            found=dtype,
            allowed=compute,
            repair=f"set {switch} or remove param_dtype",
        )


def _accumulation_dtype(config: Config, compute: Dtype, findings: Findings) -> Dtype:
    path = "data_types.grad_accum_dtype"
    dtype = config.data_types.grad_accum_dtype
    if dtype is None:
        return findings.resolved(path, "fp32", "sums of 16-bit gradients lose small terms", "default")
    allowed = ACCUMULATION_DTYPES[compute]
    if dtype not in allowed:
        findings.problem(
            path,
            f"gradients of a model in {compute} cannot be accumulated in {dtype}",
            found=dtype,
            allowed=" or ".join(allowed),
            repair=f"set {path} to {allowed[-1]} or remove it",
        )
        return "fp32"
    if dtype != "fp32" and config.zero_optimization.stage == 3:
        findings.note(path, "no effect at stage 3 on more than one rank: shards of gradients are added up in fp32")
    return findings.resolved(path, dtype)


def _reduction_dtype(config: Config, compute: Dtype, findings: Findings) -> Dtype:
    path = "communication_data_type"
    dtype = config.communication_data_type
    if dtype is None:
        return findings.resolved(path, "fp32", "averages over ranks keep their small terms", "default")
    return findings.resolved(path, dtype)


def _note_wide_gradients(config: Config, compute: Dtype, findings: Findings) -> None:
    """One note where a default of this engine is not DeepSpeed's."""
    sums = {
        "accumulated": ("data_types.grad_accum_dtype", config.data_types.grad_accum_dtype),
        "reduced": ("communication_data_type", config.communication_data_type),
    }
    wide = {verb: path for verb, (path, dtype) in sums.items() if dtype is None}
    if compute == "fp32" or not wide:
        return
    message = f"gradients of the {compute} model are {' and '.join(wide)} in fp32 (DeepSpeed: in {compute})"
    findings.note(next(iter(wide.values())), message)


def _check_overflow(config: Config, compute: Dtype, findings: Findings) -> bool:
    """Non-finite gradients never reach a parameter or moment, unless the user opts out for bf16."""
    if compute != "bf16" or config.bf16.check_grad_overflow:
        return True
    path = "bf16.check_grad_overflow"
    findings.note(path, "a step with non-finite gradients is applied, not skipped, as asked")
    return findings.resolved(path, False)


def _loss_scale(config: Config, compute: Dtype, autocast: Dtype | None, findings: Findings) -> LossScalePlan:
    """fp16, in the model or under autocast, scales the loss by the rules of the fp16 section; others do not."""
    if "fp16" not in (compute, autocast):
        return LossScalePlan()
    fp16 = config.fp16
    if not fp16.enabled:
        findings.note("torch_autocast.dtype", "autocast to fp16 scales the loss, by the keys of the fp16 section")
        for fault in fp16.model_copy(update={"enabled": True}).faults():
            found = getattr(fp16, fault.key)
            findings.problem(
                f"fp16.{fault.key}", fault.message, found=found, allowed=fault.allowed, repair=fault.repair
            )
    if fp16.loss_scale > 0:
        findings.resolved("fp16.loss_scale", fp16.loss_scale, "static")
        return LossScalePlan(static=float(fp16.loss_scale), initial=float(fp16.loss_scale))
    initial = 2.0**fp16.initial_scale_power
    findings.resolved("fp16.loss_scale", 0, f"dynamic, from 2^{fp16.initial_scale_power} = {initial:.0f}")
    return LossScalePlan(
        static=0.0,
        initial=initial,
        window_steps=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=float(fp16.min_loss_scale),
    )
