"""Reading DeepSpeed's checkpoints (ZeRO stages 0 to 3, data parallel) without DeepSpeed and without trusting them.

First file to read: `convert.py`; then `partitions.py`, which says how each stage cuts parameters, and `files.py`.
"""

from engine.checkpoint.deepspeed.convert import import_checkpoint

__all__ = ["import_checkpoint"]
