"""DeepSpeed's own services and its inference side: ``nebula``, ``autotuning``, ``eigenvalue``,
``weight_quantization``, ``hybrid_engine``. Read whole, so that a misspelled key is found; none has a meaning for
training here."""

from typing import Any, ClassVar, Literal

from pydantic import Field

from engine.config.sections.base import Section


class NebulaSection(Section):
    """Azure's checkpoint service."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Use the service.")
    enable_nebula_load: bool = Field(True, description="Load through the service as well.")
    nebula_load_path: str | None = Field(None, description="Folder to load from.")
    persistent_storage_path: str | None = Field(None, description="Folder to save into.")
    persistent_time_interval: int = Field(100, ge=0, description="Seconds between persistent saves.")
    num_of_version_in_retention: int = Field(2, ge=1, description="Checkpoints to keep.")


class ModelInfoSection(Section):
    """What the autotuner knows of the model."""

    ignored_by_deepspeed: ClassVar[bool] = True

    profile: bool = Field(False, description="Measure it.")
    num_params: int | None = Field(None, ge=1, description="Parameters.")
    hidden_size: int | None = Field(None, ge=1, description="Width.")
    num_layers: int | None = Field(None, ge=1, description="Layers.")


class AutotuningSection(Section):
    """DeepSpeed's autotuner: it starts many short runs in place of this one, and ends them with ``exit()``."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Tune instead of training.")
    fast: bool = Field(True, description="Tune the micro-batch size only.")
    results_dir: str | None = Field(None, description="Folder of the results.")
    exps_dir: str | None = Field(None, description="Folder of the experiments.")
    overwrite: bool = Field(True, description="Run experiments again that have results.")
    start_profile_step: int = Field(3, ge=0, description="First measured step.")
    end_profile_step: int = Field(5, ge=0, description="Last measured step.")
    metric: Literal["throughput", "latency", "flops", "forward", "step"] = Field(
        "throughput", description="What is to be best."
    )
    metric_path: str | None = Field(None, description="File of the measured values.")
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field("gridsearch", description="How it searches.")
    tuner_early_stopping: int = Field(5, ge=0, description="Trials without progress before it gives up.")
    tuner_num_trials: int = Field(50, ge=1, description="Trials at most.")
    arg_mappings: dict[str, Any] | None = Field(None, description="Path in the config -> command-line argument.")
    max_train_batch_size: int | None = Field(None, ge=1, description="Samples per optimizer step at most.")
    min_train_batch_size: int = Field(1, ge=1, description="Samples per optimizer step at least.")
    max_train_micro_batch_size_per_gpu: int = Field(1024, ge=1, description="Micro-batch size at most.")
    min_train_micro_batch_size_per_gpu: int = Field(1, ge=1, description="Micro-batch size at least.")
    num_tuning_micro_batch_sizes: int = Field(3, ge=1, description="Micro-batch sizes to try.")
    mp_size: int = Field(1, ge=1, description="Model-parallel ranks.")
    model_info: ModelInfoSection | None = Field(None, description="What is known of the model.")
    model_info_path: str | None = Field(None, description="File of what is known of the model.")


class EigenvalueSection(Section):
    """An input of DeepSpeed's quantization schedule; at the top level DeepSpeed ignores it."""

    ignored_by_deepspeed: ClassVar[bool] = True
    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Estimate eigenvalues of the Hessian's blocks.")
    verbose: bool = Field(False, description="Print them.")
    max_iter: int = Field(100, ge=1, description="Power iterations at most.")
    tol: float = Field(1e-2, ge=0, description="Relative change that ends the iteration.")
    stability: float = Field(1e-6, ge=0, description="Added to denominators.")
    gas_boundary_resolution: int = Field(1, ge=1, description="Updates between estimates.")
    layer_name: str = Field("bert.encoder.layer", description="Name of the list of blocks.")
    layer_num: int = Field(0, ge=0, description="Number of blocks.")


class WeightQuantizationSection(Section):
    """Quantized weights for inference."""

    enabled: bool = Field(True, description="Quantize.")
    quantized_initialization: dict[str, Any] = Field({}, description="Quantize while the model is built.")
    post_init_quant: dict[str, Any] = Field({}, description="Quantize the finished model, by module name.")


class HybridEngineSection(Section):
    """DeepSpeed's engine for generation inside training."""

    shorthand: ClassVar[str] = "enabled"

    enabled: bool = Field(False, description="Switch between training and generation.")
    max_out_tokens: int = Field(512, ge=1, description="Tokens to generate at most.")
    inference_tp_size: int = Field(1, ge=1, description="Ranks that share a layer while generating.")
    release_inference_cache: bool = Field(False, description="Free the cache after generating.")
    pin_parameters: bool = Field(True, description="Page-locked memory for parameters.")
    tp_gather_partition_size: int = Field(8, ge=1, description="Layers gathered together.")
    enable_cuda_graph: bool = Field(False, description="Generate from CUDA graphs.")
