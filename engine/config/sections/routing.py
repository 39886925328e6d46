"""``data_efficiency.data_routing``: which tokens pass through which layers."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import PRESENT, Fault, Section, when


class LtdScheduleConfigSection(Section):
    """Arguments of the kept-token schedule."""

    ignored_by_deepspeed: ClassVar[bool] = True

    require_steps: int | None = Field(None, ge=1, description="Steps until all tokens are kept.")
    seq_per_step: int | None = Field(None, ge=1, description="Kept tokens are multiples of this.")


class LtdScheduleSection(Section):
    """How many tokens the middle layers keep."""

    ignored_by_deepspeed: ClassVar[bool] = True

    min_value: int | None = Field(None, ge=1, description="Tokens kept at the start.")
    max_value: int | None = Field(None, ge=1, description="Tokens kept at the end.")
    schedule_type: Literal["fixed_linear"] = Field("fixed_linear", description="How the number grows.")
    schedule_config: LtdScheduleConfigSection | None = Field(None, description="Arguments of the schedule.")
    compat: Literal["deepspeed"] | None = Field(
        None, description='"deepspeed": numbers as DeepSpeed computes them, which may miss both ends.'
    )

    def faults_when_on(self) -> Iterator[Fault]:
        low, high, config = self.min_value, self.max_value, self.schedule_config or LtdScheduleConfigSection()
        for key in ("min_value", "max_value"):
            if getattr(self, key) is None:
                yield Fault(key, "is missing, and random_ltd is enabled", "an integer >= 1")
        for key in ("require_steps", "seq_per_step"):
            if getattr(config, key) is None:
                yield Fault(f"schedule_config.{key}", "is missing, and random_ltd is enabled", "an integer >= 1")
        if low is None or high is None:
            return
        if low > high:
            yield Fault("min_value", f"{low} is above max_value {high}", f"at most {high}", depends=("max_value",))
            return
        size, where = config.seq_per_step, "schedule_config.seq_per_step"
        if size is not None and low % size and self.compat is None:  # the maximum is reached whatever the steps are
            below = low // size * size
            fits = f"{below} or {below + size}" if below else f"{size}"
            yield Fault(
                where,
                f"{size} does not divide min_value {low}: {low} = {low // size} x {size} + {low % size}",
                f"a divisor of {low}",
                f'set min_value to {fits}, or seq_per_step to a divisor; "compat": "deepspeed" takes any',
                depends=("min_value",),
            )


class LayerTokenScheduleSection(Section):
    """A learning rate that follows layer tokens; DeepSpeed has only its keys."""

    ignored_by_deepspeed: ClassVar[bool] = True

    enabled: bool = Field(False, description="Let the learning rate follow layer tokens.")
    total_layer_tokens: int | None = Field(None, ge=1, description="Layer tokens of the whole run.")
    warmup_type: str | None = Field(None, description="Kind of warm-up.")
    warmup_layer_tokens: int | None = Field(None, ge=0, description="Layer tokens of the warm-up.")


class RandomLtdSection(Section):
    """Random layerwise token dropping: middle layers see a random part of the tokens."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    schema_rules: ClassVar[tuple[dict[str, Any], ...]] = (
        when(
            "enabled",
            True,
            required=["random_ltd_schedule"],
            properties={
                "random_ltd_schedule": {
                    "type": "object",
                    "required": ["min_value", "max_value", "schedule_config"],
                    "properties": {
                        "min_value": PRESENT,
                        "max_value": PRESENT,
                        "schedule_config": {
                            "type": "object",
                            "required": ["require_steps", "seq_per_step"],
                            "properties": dict.fromkeys(("require_steps", "seq_per_step"), PRESENT),
                        },
                    },
                },
            },
        ),
    )

    enabled: bool = Field(False, description="Drop tokens.")
    total_layer_num: int | None = Field(None, ge=1, description="Layers of the model.")
    random_ltd_layer_num: int | None = Field(None, ge=1, description="Layers that drop tokens.")
    random_ltd_layer_id: list[int] | None = Field(None, description="Numbers of those layers.")
    model_mask_name: str | None = Field(None, description="Name of the attention mask argument.")
    model_type: Literal["encoder", "decoder"] = Field("decoder", description="Kind of model.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] = Field(
        "batch_seq_dim", description="Layout of activations."
    )
    random_ltd_schedule: LtdScheduleSection | None = Field(None, description="How many tokens are kept.")
    layer_token_lr_schedule: LayerTokenScheduleSection | None = Field(
        None, description="Learning rates by layer tokens."
    )
    global_batch_size: int | None = Field(None, ge=1, description="Filled in by DeepSpeed itself.")
    micro_batch_size: int | None = Field(None, ge=1, description="Filled in by DeepSpeed itself.")

    def faults(self) -> Iterator[Fault]:
        if not self.enabled:
            return
        ids, count = self.random_ltd_layer_id, self.random_ltd_layer_num
        if ids is not None and count is not None and len(ids) != count:
            yield Fault(
                "random_ltd_layer_id",
                f"names {len(ids)} layers; random_ltd_layer_num is {count}",
                f"{count} numbers",
                depends=("random_ltd_layer_num",),
            )
        if ids is not None:
            yield from self._layer_faults(ids)
        if self.random_ltd_schedule is None:
            yield Fault("random_ltd_schedule", "is missing, and random_ltd is enabled", "an object")
            return
        for fault in self.random_ltd_schedule.faults_when_on():
            above = "random_ltd_schedule."
            yield fault._replace(key=above + fault.key, depends=tuple(above + key for key in fault.depends))

    def _layer_faults(self, ids: list[int]) -> Iterator[Fault]:
        total = self.total_layer_num
        if not ids or len(set(ids)) < len(ids) or min(ids) < 0:
            yield Fault("random_ltd_layer_id", f"is {ids}", "numbers of different layers, the first of which is 0")
        elif total is not None and max(ids) >= total:
            yield Fault(
                "random_ltd_layer_id",
                f"names layer {max(ids)}; total_layer_num is {total}",
                f"0 to {total - 1}",
                depends=("total_layer_num",),
            )


class DataRoutingSection(Section):
    """Which tokens pass through which layers."""

    ignored_by_deepspeed: ClassVar[bool] = True

    enabled: bool = Field(False, description="DeepSpeed does not read it: the inner switch counts.")
    random_ltd: RandomLtdSection | None = Field(None, description="Random layerwise token dropping.")
