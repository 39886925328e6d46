"""One micro-batch through a model: what forward keeps for backward, the working peak, the FLOPs.

Meant for torch's fake tensors, which carry shapes and no values. Of equal blocks one runs and stands for all, so that a
model of a hundred blocks takes no longer than one of two. Real tensors are counted alike, every block of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from engine.plan.facts import Boundary, Crossings, ForwardFacts, Kept
from engine.torch_compat import DispatchMode, flops_of_cpu_attention, tree_leaves, tree_map_tensors

BEFORE, AFTER = -1, -2
"""Where something is kept, beside the index of a block."""

LossOf = Callable[[nn.Module], Tensor]
OnGraph = Callable[[Tensor, Sequence[Any]], None]
Styles = Mapping[str, str]
"""Module name -> ``column``, ``row``, ``vocabulary`` or ``head``: how tensor parallelism cuts it."""


def measure_forward(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    loss_of: LossOf,
    samples: int,
    sequence_length: int,
    styles: Styles | None = None,
    every_block: bool = False,
    on_graph: OnGraph | None = None,
) -> ForwardFacts:
    """``loss_of(model)`` runs one micro-batch of ``samples`` x ``sequence_length`` tokens and returns the loss (0-dim).

    ``every_block``: none stands for others. ``on_graph`` sees, before the backward, the loss and what blocks returned.
    """
    twins = {} if every_block else _twins(blocks)
    try:
        return _Run(model, blocks, twins, styles or {}, on_graph).facts(loss_of, samples, sequence_length)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
        if not twins:
            raise
        # blocks that look alike and are not called alike: each has to run
        return _Run(model, blocks, {}, styles or {}, on_graph).facts(loss_of, samples, sequence_length)


def _twins(blocks: Sequence[nn.Module]) -> dict[int, int]:
    """Block -> the block that stands for it: the first of its kind, by class and shapes. Those have no entry."""
    kinds = [(type(block), tuple((n, p.shape, p.dtype) for n, p in block.named_parameters())) for block in blocks]
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    return {index: first[kind] for index, kind in enumerate(kinds) if first[kind] != index}


class _Run:
    """One forward and backward, and what is counted on the way."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        twins: Mapping[int, int],
        styles: Styles,
        on_graph: OnGraph | None,
    ) -> None:
        self._on_graph = on_graph
        self.model, self.blocks, self.twins = model, blocks, twins
        self.kept: dict[int, Kept] = defaultdict(Kept)
        self.crossings: dict[int, Crossings] = defaultdict(Crossings)
        self.block_flops: dict[int, int] = defaultdict(int)
        self.boundaries: dict[int, Boundary] = defaultdict(Boundary)
        self.entering: Tensor | None = None
        self.attention: tuple[int, int] | None = None
        """(queries, keys) of the attention that runs now."""
        self._place = BEFORE
        self._modules: list[nn.Module] = []
        self._inputs: dict[int, list[Any]] = {}
        self._outputs: dict[int, Any] = {}
        self._flops_before: int | None = None
        self._opened: Tensor | None = None
        self._seen: dict[int, StorageWeakRef] = {}
        own = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        self._own = {StorageWeakRef(storage).cdata for storage in own}
        self._live = _Live(own)
        self._flops = FlopCounterMode(display=False, custom_mapping=flops_of_cpu_attention())
        named = dict(model.named_modules())
        self._styles = {named[name]: style for name, style in styles.items()}
        ends = (module for module, style in self._styles.items() if style in ("head", "vocabulary"))
        self._vocabularies = {module.weight.shape[0] for module in ends}

    def facts(self, loss_of: LossOf, samples: int, sequence_length: int) -> ForwardFacts:
        saved = torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor)
        with self._watching(), torch.enable_grad(), self._flops, self._live:
            with saved, _Attention(self):
                loss = loss_of(self.model)
            forward = self._flops.get_total_flops()
            kept_bytes = sum(kept.total_bytes for kept in self.kept.values())
            if self._on_graph is not None:
                self._on_graph(loss, [self._outputs[index] for index in range(len(self.blocks))])
            loss.backward()
            backward = self._flops.get_total_flops() - forward
        times = Counter(self.twins.values())
        repeated = sum(times[index] * count for index, count in self.block_flops.items())
        ran = sum(self.block_flops.values())
        # a matrix product has two in backward; what is left of backward is of the blocks that ran
        of_blocks = [self.twins.get(index, index) for index in range(len(self.blocks))]
        before = self._flops_before or 0
        in_backward = (backward - 2 * (forward - ran)) / ran if ran else 0.0
        return ForwardFacts(
            samples=samples,
            sequence_length=sequence_length,
            before=self.kept[BEFORE],
            blocks=tuple(self.kept[index] for index in of_blocks),
            after=self.kept[AFTER],
            entering_bytes=0 if self.entering is None else _nbytes(self.entering),
            working_bytes=max(0, self._live.peak - kept_bytes),
            forward_flops=forward + repeated,
            backward_flops=backward + round(in_backward * repeated),
            block_forward_flops=ran + repeated,
            crossings=tuple(self.crossings[place] for place in (BEFORE, *of_blocks, AFTER)),
            cuts_logits="head" in self._styles.values(),
            block_flops=tuple(self.block_flops[index] for index in of_blocks),
            before_flops=before,
            after_flops=forward - before - ran,
            boundaries=tuple(self.boundaries[index] for index in of_blocks),
        )

    # --- where the run is ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Follow which module runs. A parameter's gradient is let go of as it comes: model states are counted apart."""
        handles = []
        for module in self.model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        for module, style in self._styles.items():
            handles.append(module.register_forward_hook(self._cross(style)))
        for index, block in enumerate(self.blocks):
            handles.append(block.register_forward_pre_hook(self._enter_block(index), with_kwargs=True))
            handles.append(block.register_forward_hook(self._leave_block(index)))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(_let_go))
        for index, twin in self.twins.items():
            self.blocks[index].forward = self._stand_in(twin)
        try:
            yield
        finally:
            for index in self.twins:
                del self.blocks[index].forward
            for handle in handles:
                handle.remove()
            for parameter in self.model.parameters():
                parameter.grad = None

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._modules.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    def _enter_block(self, index: int) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._place = index
            self.entering = _first_tensor((args, kwargs))
            self._inputs[index] = _shapes((args, kwargs))
            if self._flops_before is None:
                self._flops_before = self._flops.get_total_flops()
            self.block_flops[index] -= self._flops.get_total_flops()

        return enter

    def _leave_block(self, index: int) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._place = AFTER
            self._outputs[index] = output
            self.boundaries[index] = self._boundary(output)
            self.block_flops[index] += self._flops.get_total_flops()

        return leave

    def _boundary(self, output: Any) -> Boundary:
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        wanting = [tensor for tensor in tensors if tensor.requires_grad]
        storages = {StorageWeakRef(tensor.untyped_storage()).cdata: tensor for tensor in wanting}
        return Boundary(
            tensors=len(tensors),
            tensor_bytes=sum(map(_nbytes, tensors)),
            gradients=len(wanting),
            gradient_bytes=sum(map(_nbytes, wanting)),
            spare_bytes=sum(_nbytes(tensor) for data, tensor in storages.items() if data not in self._seen),
        )

    def _cross(self, style: str) -> Callable[..., None]:
        """A layer that tensor parallelism cuts was called. Layers that read the same tensor open it once."""

        def cross(module: nn.Module, args: Any, output: Any) -> None:
            if style in ("row", "vocabulary"):
                self.crossings[self._place] += Crossings(closing_calls=1, closing_bytes=_nbytes(_first_tensor(output)))
                self._opened = None
            elif args[0] is not self._opened:
                self.crossings[self._place] += Crossings(opening_calls=1, opening_bytes=_nbytes(args[0]))
                self._opened = args[0]

        return cross

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """scaled_dot_product_attention is called."""
        both = _nbytes(key) + _nbytes(value)
        self.crossings[self._place] += Crossings(
            attention_calls=1,
            query_key_value_bytes=_nbytes(query) + both,
            key_value_bytes=both,
            key_value_elements=key.numel() + value.numel(),
            output_bytes=query.numel() // query.shape[-1] * value.shape[-1] * query.element_size(),
        )
        if query.shape[-1] != key.shape[-2]:  # else queries, keys and matrix look alike
            self.attention = (query.shape[-2], key.shape[-2])

    def _stand_in(self, twin: int) -> Callable[..., Any]:
        """A forward that passes its input on, in the form in which ``twin`` gave its output."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            output, entering = self._outputs[twin], _first_tensor((args, kwargs))
            leaving = _first_tensor(output)
            if _shapes((args, kwargs)) != self._inputs[twin] or _shapes(leaving) != _shapes(entering):
                raise RuntimeError("the block is called in another way, or does not give what it gets")
            return tree_map_tensors(lambda tensor: entering if tensor is leaving else tensor, output)

        return forward

    # --- what is kept --------------------------------------------------------------------------------------------

    def _note(self, tensor: Tensor) -> Tensor:
        """Autograd keeps ``tensor``: each storage counts once, where it is first kept; parameters do not."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._own and reference.cdata not in self._seen:
            self._seen[reference.cdata] = reference
            size = storage.nbytes()
            spare = size if self._is_attention_matrix(tensor) else self._live.mask_bytes(storage)
            cut = size if self._is_cut(tensor) else 0
            self.kept[self._place] += Kept(size - cut, cut, spare)
        return tensor

    def _is_attention_matrix(self, tensor: Tensor) -> bool:
        """Queries x keys: kept by scaled_dot_product_attention where no fused kernel serves (dropout on a CPU, say)."""
        return self.attention is not None and tuple(tensor.shape[-2:]) == self.attention

    def _is_cut(self, tensor: Tensor) -> bool:
        """Whether tensor parallelism leaves each rank a part of it.

        The inputs of ``row`` layers are cut, those of ``column`` layers and norms are not; of what functions keep, all
        is cut inside a block that is not shaped as the activation between blocks, and the logits outside.
        """
        if not self._styles:
            return False
        module = self._modules[-1] if self._modules else self.model
        if module in self._styles:
            weight = module.weight
            return self._styles[module] == "row" or (isinstance(weight, Tensor) and tensor.numel() == weight.numel())
        if self._place < 0:
            return tensor.ndim > 0 and tensor.shape[-1] in self._vocabularies
        if next(module.parameters(recurse=False), None) is not None:
            return False
        between = self.entering
        return between is None or tensor.numel() != between.numel() or tensor.shape[-1] != between.shape[-1]


class _Attention(TorchFunctionMode):
    """Tells a run when it is inside scaled_dot_product_attention."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value")
        self._run.attend(*(args[i] if len(args) > i else kwargs[name] for i, name in enumerate(names)))
        try:
            return func(*args, **kwargs)
        finally:
            self._run.attention = None


class _Live(DispatchMode):
    """Bytes of storages that are alive, without those in ``known``, and their peak."""

    def __init__(self, known: Sequence[torch.UntypedStorage]) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known = weakref.WeakKeyDictionary(dict.fromkeys(known, 0))
        self._masks = weakref.WeakKeyDictionary[torch.UntypedStorage, int]()

    def mask_bytes(self, storage: torch.UntypedStorage) -> int:
        """What a dropout mask takes beyond one byte an element; 0 for anything else."""
        return self._masks.get(storage, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_mask = func.overloadpacket in (torch.ops.aten.bernoulli_, torch.ops.aten.bernoulli)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    size = storage.nbytes()
                    self._known[storage] = size
                    self.bytes += size
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._freed, size)
                if is_mask:
                    self._masks[storage] = storage.nbytes() - tensor.numel()
        return output

    def _freed(self, size: int) -> None:
        self.bytes -= size


def _shapes(tree: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


def _first_tensor(tree: Any) -> Tensor:
    """Raises LookupError for a tree without tensors."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            return leaf
    raise LookupError("no tensor goes through the block")
