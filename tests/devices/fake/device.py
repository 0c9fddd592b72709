"""A CUDA device for fake tensors on the CPU build of torch: what ``guard.cpp`` cannot give to Python.

Fake tensors have a device, a shape and a dtype, but no data. An operation on tensors of two devices raises an
error, as on a GPU.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICES = 8


# The GPU kernels of these operators take no scalar on the CPU; fake tensors would allow one.
_STRICT = ("_amp_", "_fused_")

# Without bmm: the attention of fake tensors is not the kernel of a GPU, and computes in fp32.
_PRODUCTS = ("mm.", "addmm.")


class Host(TorchDispatchMode):
    """Answer each read of a tensor's value by the host, and note which device was read.

    A number on the GPU is 0, for example a flag that gradients are not finite. A number on the CPU is 1, for
    example the number of an optimizer's steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []
        self.operations: set[str] = set()
        self.multiplied: set[str] = set()
        """The dtypes of matrices that are multiplied."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.operations.update(f"{function.__name__} {kind.__name__}" for kind in types)
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
            place = args[0].device.type
            self.devices.append(place)
            return 0.0 if place == "cuda" else 1.0
        if function.__name__.startswith(_PRODUCTS):
            self.multiplied.update(str(one.dtype) for one in args if one.dim() > 1)
        if function.__name__.startswith(_STRICT):
            given = tree_leaves((args, kwargs))
            places = {str(one.device) for one in given if isinstance(one, torch.Tensor)}
            if len(places) > 1:
                raise RuntimeError(f"{function} has tensors on {' and '.join(sorted(places))}")
        return function(*args, **(kwargs or {}))


class _FakeTensors(FakeTensorMode):
    # As on a machine without a GPU: torch.tensor(..., device=...) allocates nothing before it is fake.
    avoid_device_init = True


def install() -> None:
    """Let ``torch.cuda`` answer as on a node with eight H100, with the guard's streams and events."""
    assert torch.accelerator.current_accelerator() == torch.device("cuda"), "start with the guard"
    here = torch.cuda
    here._lazy_init = lambda: None
    here.is_available = here.is_initialized = lambda: True
    here.device_count = lambda: DEVICES
    here.current_device = torch.accelerator.current_device_index
    here.set_device = torch.accelerator.set_device_index
    here.synchronize = torch.accelerator.synchronize
    here.current_stream = torch.accelerator.current_stream
    here.get_device_capability = lambda *_: (9, 0)
    here.get_device_name = lambda *_: "NVIDIA H100 80GB HBM3"
    here.is_bf16_supported = lambda *_: True
    here.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)
    here.set_rng_state = lambda *_: None
    here.Event = partial(torch.Event, "cuda")
    here.Stream = partial(torch.Stream, "cuda")
    here.stream = lambda *_: contextlib.nullcontext()
    torch.nn.Module.to = _to
    # The memory of a fake tensor belongs to no stream.
    torch.Tensor.record_stream = lambda *_: None


@contextlib.contextmanager
def fake_tensors() -> Iterator[Host]:
    """Make every tensor of the block a fake tensor."""
    with _FakeTensors(allow_non_fake_inputs=True), Host() as reads:
        yield reads


def _to(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model; torch's own ``Module.to`` cannot swap fake parameters."""
    for part in model.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                moved = parameter.detach().to(device)
                part._parameters[name] = torch.nn.Parameter(moved, parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return model
