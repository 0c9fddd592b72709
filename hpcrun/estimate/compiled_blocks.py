"""Count the activations of compiled blocks as torch.compile keeps them.

AOTAutograd's partitioner divides the graph of a block: it keeps the smallest set of tensors from which the
backward pass computes the rest without products. It runs here on fake tensors, without a compiler. Results
that inductor fuses into kernels never exist, so they do not count. Source: ``torch._functorch.partitioners``.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch._functorch.aot_autograd import aot_function
from torch._inductor.decomposition import select_decomp_table
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten

from hpcrun.estimate.live_storages import LiveStorages
from hpcrun.train.model.prepare import blocks


def compile_blocks(model: nn.Module, live: LiveStorages, tell: Callable[[str], None]) -> None:
    """Let the blocks of ``model``, which are not checkpointed, keep what they keep with torch.compile.

    ``tell`` gets a line if a block cannot be traced, and keeps its activations as without compilation.
    """
    graphs: dict[Any, Callable[..., Any]] = {}
    for block in blocks(model):
        _Traced(block, live, graphs, tell)


class _Traced:
    """Replaces the forward pass of a block; blocks with equal graphs share them."""

    def __init__(
        self,
        block: nn.Module,
        live: LiveStorages,
        graphs: dict[Any, Callable[..., Any]],
        tell: Callable[[str], None],
    ) -> None:
        self._live, self._graphs, self._tell = live, graphs, tell
        # Without the hooks of FSDP, which gather weights around the block.
        self._block, self._forward = block, block.forward
        changed: Any = block
        changed.forward = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        names, values = [], []
        for name, value in (*self._block.named_parameters(), *self._block.named_buffers()):
            names.append(name)
            values.append(value)
        flat, shape = tree_flatten((values, arguments, options))
        described = [
            (v.shape, v.dtype, v.requires_grad) if isinstance(v, Tensor) else v for v in flat
        ]
        key = repr((type(self._block), self._block, described, shape))
        if "failed" in self._graphs:
            return self._forward(*arguments, **options)
        try:
            if key not in self._graphs:
                self._graphs[key] = self._traced(names)
            with self._live.counting(False):
                return self._graphs[key](values, arguments, options)
        # Any error: code of the model, which torch.compile would divide into several graphs.
        except Exception as error:
            self._graphs["failed"] = self._forward
            self._tell(
                f"train.compile: {type(self._block).__name__} is no single graph ({type(error).__name__}); "
                "counting the activations of eager execution"
            )
            return self._forward(*arguments, **options)

    def _traced(self, names: list[str]) -> Callable[..., Any]:
        def passes(values: list[Tensor], arguments: Any, options: Any) -> Any:
            with _reparametrize_module(self._block, dict(zip(names, values, strict=True))):
                return self._forward(*arguments, **options)

        def divided(joint: fx.GraphModule, inputs: Any, **how: Any) -> Any:
            how["static_lifetime_input_indices"] = list(range(len(names)))
            return partitioners.min_cut_rematerialization_partition(joint, inputs, **how)

        made: Callable[..., Any] = aot_function(
            passes,
            fw_compiler=partial(_Graph, self._live),
            bw_compiler=partial(_Graph, self._live),
            partition_fn=divided,
            decompositions=select_decomp_table(),
        )
        return made


class _Graph:
    """A graph that runs operation by operation, and counts only results that a fused graph has too."""

    # The list of arguments becomes empty, and each argument frees its memory after its last use.
    _boxed_call = True

    def __init__(self, live: LiveStorages, graph: fx.GraphModule, _inputs: Any) -> None:
        kinds = partitioners.get_default_op_list()
        stored: set[fx.Node] = set()
        for node in reversed(graph.graph.nodes):
            views = kinds.is_view(node) or node.target is operator.getitem
            read = any(
                user.op == "output"
                or not (kinds.is_fusible(user) or kinds.is_view(user))
                or (kinds.is_view(user) and user in stored)
                for user in node.users
            )
            if read or not (views or kinds.is_fusible(node)):
                stored.add(node)
        self._interpreter = _Interpreter(graph, live, stored)

    def __call__(self, arguments: list[Any]) -> Any:
        return self._interpreter.boxed_run(arguments)


class _Interpreter(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, live: LiveStorages, stored: set[fx.Node]) -> None:
        super().__init__(graph)
        self._live, self._stored = live, stored

    def run_node(self, n: fx.Node) -> Any:
        with self._live.counting(n in self._stored):
            return super().run_node(n)
