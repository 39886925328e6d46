"""``fp16``, ``bf16``, ``torch_autocast``, ``amp``, ``data_types``."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from engine.config.sections.base import Fault, Section, when

DtypeName = Literal["fp32", "fp16", "bf16"]


class Fp16Section(Section):
    """Half precision with loss scaling."""

    shorthand: ClassVar[str] = "enabled"
    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        {
            "if": {
                "properties": {"enabled": {"const": True}, "loss_scale": {"const": 0}},
                "required": ["enabled"],
            },
            "then": {"properties": {"loss_scale_window": {"minimum": 1}, "min_loss_scale": {"exclusiveMinimum": 0}}},
        },
    )

    enabled: bool = Field(False, description="Parameters and activations in fp16, masters in fp32.")
    auto_cast: bool = Field(False, description="Cast floating inputs of forward to fp16.")
    loss_scale: float = Field(0.0, ge=0, description="0: dynamic loss scaling; greater than 0: this fixed scale.")
    initial_scale_power: int = Field(16, ge=0, le=126, description="The dynamic scale starts at 2 to this power.")
    loss_scale_window: int = Field(1000, ge=0, description="Clean steps after which the dynamic scale doubles.")
    hysteresis: int = Field(2, ge=1, description="Overflows that are forgiven before the scale is halved, plus one.")
    consecutive_hysteresis: bool = Field(False, description="Forgive anew after every clean step.")
    min_loss_scale: float = Field(1.0, ge=0, description="The dynamic scale never falls below this.")
    fp16_master_weights_and_grads: bool = Field(
        False, description="Keep masters and gradients in fp16 as well (with the optimizer offloaded)."
    )

    def faults(self) -> Iterator[Fault]:
        if not self.enabled or self.loss_scale > 0:
            return
        if self.loss_scale_window < 1:
            yield Fault(
                "loss_scale_window",
                "is 0 with dynamic loss scaling",
                "an integer >= 1",
                "the default is 1000",
                depends=("loss_scale",),
            )
        if self.min_loss_scale <= 0:
            yield Fault(
                "min_loss_scale",
                "is 0 with dynamic loss scaling",
                "a number > 0",
                "the default is 1",
                depends=("loss_scale",),
            )
        if self.min_loss_scale > 2.0**self.initial_scale_power:
            yield Fault(
                "min_loss_scale",
                f"{self.min_loss_scale:g} is above the initial scale 2^{self.initial_scale_power} = "
                f"{2**self.initial_scale_power}, so the first overflow would raise the scale",
                f"at most {2**self.initial_scale_power}",
                "lower min_loss_scale or raise initial_scale_power",
                depends=("loss_scale", "initial_scale_power"),
            )


class Bf16Section(Section):
    """bfloat16 compute, without loss scaling."""

    shorthand: ClassVar[str] = "enabled"
    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when(
            "bf16_optimizer_states",
            True,
            required=["bf16_master_weights_and_grads"],
            properties={"bf16_master_weights_and_grads": {"const": True}},
        ),
    )

    enabled: bool = Field(False, description="Parameters and activations in bf16, masters in fp32.")
    immediate_grad_update: bool = Field(False, description="Accumulate gradients as soon as each one is ready.")
    check_grad_overflow: bool = Field(True, description="Skip a step whose gradients are not finite.")
    bf16_master_weights_and_grads: bool = Field(False, description="Keep masters and gradients in bf16 as well.")
    bf16_optimizer_states: bool = Field(False, description="Keep optimizer moments in bf16 as well.")

    def faults(self) -> Iterator[Fault]:
        if self.bf16_optimizer_states and not self.bf16_master_weights_and_grads:
            yield Fault(
                "bf16_optimizer_states",
                "needs bf16_master_weights_and_grads",
                "set both to true, or neither",
                depends=("bf16_master_weights_and_grads",),
            )


class TorchAutocastSection(Section):
    """``torch.autocast`` around forward; parameters stay fp32."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Run forward under torch.autocast.")
    dtype: Literal["bf16", "fp16"] | None = Field(None, description="The autocast dtype; null means bf16.")
    lower_precision_safe_modules: list[str] | None = Field(
        None,
        description="Module classes whose gradients may travel in the lower dtype; null: Linear, Conv1d to 3d.",
    )


class DataTypesSection(Section):
    """Dtypes of what is neither parameter nor activation."""

    ignored_by_deepspeed: ClassVar[bool] = True

    grad_accum_dtype: DtypeName | None = Field(
        None, description="Dtype in which gradients accumulate over micro-batches; null means fp32 here."
    )
    param_dtype: DtypeName | None = Field(None, description="Must agree with the precision that is enabled.")
    buffer_dtype: DtypeName | None = Field(None, description="Cast floating buffers to this dtype; null leaves them.")


class AmpSection(Section):
    """Apex AMP, which is no longer developed. Its other keys go to Apex and are kept as they are."""

    model_config = ConfigDict(extra="allow")
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Use Apex AMP. Not available here: use fp16, bf16 or torch_autocast.")
    opt_level: str | None = Field(None, description="Apex's optimization level.")

    def arguments(self) -> dict[str, Any]:
        """What would have gone to ``apex.amp.initialize``."""
        return dict(self.model_extra or {})
