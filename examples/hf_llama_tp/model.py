"""Hugging Face's Llama, built from a config: nothing is downloaded, and nothing here knows of ranks."""

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast


class Llama(LlamaForCausalLM):
    """(batch, length) int64 -> an output with logits, and with ``labels`` the mean loss in nats.

    The labels of the byte corpus are the next tokens already; transformers would shift them once more.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(LlamaConfig(**sizes))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutputWithPast:
        return super().forward(input_ids=input_ids, labels=labels, shift_labels=labels, use_cache=False)
