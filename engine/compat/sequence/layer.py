"""What scripts import from ``deepspeed.sequence.layer``."""

from engine.model.sequence_parallel.distributed_attention import DistributedAttention

__all__ = ["DistributedAttention"]
