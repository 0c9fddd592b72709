"""The interfaces for accelerators, with a device module of the tests in place of the vendor's."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrun.devices import accelerator, vendor
from hpcrun.worker import grow_memory


class Module:
    """Functions that torch requires of the module of a device type, with generators that are numbers."""

    def __init__(self, count: int, current: int, generators: dict[int, int]) -> None:
        self._count, self._current, self.generators = count, current, generators
        self.is_available = self.is_initialized = lambda: True

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        return self._current

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor([self.generators[device.index]], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.generators[device.index] = int(state)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives this process accelerators."""

    def give(module: Module, kind: str = "xpu") -> Module:
        monkeypatch.setattr(accelerator, "kind", lambda: kind)
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        return module

    return give


def test_the_cpu_is_the_default_where_torch_sees_no_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    for current in (lambda: None, refuse):  # newer versions of torch, and 2.6
        monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
        assert accelerator.kind() is None
        assert accelerator.count() == 0
        assert accelerator.default_device() == torch.device("cpu")
        assert accelerator.generator_states() is None
        # A rank with one GPU, before the check that torch sees the GPU.
        assert accelerator.device(3) == torch.device(vendor.KIND, 3)


def test_a_build_for_gpus_without_a_gpu_uses_the_cpu(machine: Any) -> None:
    machine(Module(0, 0, {}))
    assert accelerator.default_device() == torch.device("cpu")
    assert accelerator.generator_states() is None


def test_generators_of_all_devices_return_also_with_another_current_device(machine: Any) -> None:
    machine(Module(4, 2, {0: 10, 1: 11, 2: 12, 3: 13}))
    saved = accelerator.generator_states()
    assert saved is not None
    assert [int(state) for state in saved["states"]] == [12, 13, 10, 11]
    same = machine(Module(4, 2, dict.fromkeys(range(4), 0)))
    assert accelerator.restore_generators(saved) is None
    assert same.generators == {0: 10, 1: 11, 2: 12, 3: 13}
    # On a node with two GPUs the rank has the first: its own generator comes first.
    smaller = machine(Module(2, 0, dict.fromkeys(range(2), 0)))
    assert accelerator.restore_generators(saved) is None
    assert smaller.generators == {0: 12, 1: 13}


def test_generators_of_another_type_of_device_are_not_restored(machine: Any) -> None:
    here = machine(Module(1, 0, {0: 5}))
    note = accelerator.restore_generators({"kind": "cuda", "states": [torch.zeros(1)]})
    assert note == (
        "the CUDA generator's state was not restored, because this machine has XPU devices"
    )
    assert here.generators == {0: 5}


def test_memory_is_read_from_the_module_without_torch_statistics(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(mem_get_info=lambda _: (3, 8), max_memory_allocated=lambda _: 5)
    machine(module)
    device = torch.device("xpu", 0)
    for name in ("get_memory_info", "max_memory_allocated"):
        monkeypatch.delattr(torch.accelerator, name, raising=False)  # as before torch 2.9
    assert (accelerator.memory(device), accelerator.peak_memory(device)) == ((3, 8), 5)


def test_the_switches_of_a_vendor_do_nothing_on_another_device() -> None:
    before = torch.get_float32_matmul_precision()
    vendor.allow_tf32(torch.device("xpu"))
    assert torch.get_float32_matmul_precision() == before
    if not torch.cuda.is_available():
        assert vendor.lock_pages(0, 1) == (None, "")


def test_an_event_is_recorded_on_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: device)
    streams: list[object] = []
    event: Any = SimpleNamespace(record=streams.append)
    accelerator.record(event, torch.device("cuda", 3))
    assert streams == [torch.device("cuda", 3)]


@pytest.mark.parametrize("kind", [None, "", "CUDA_", "HIP_"])
def test_segments_grow_unless_the_allocator_is_configured(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {} if kind is None else {f"PYTORCH_{kind}ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setattr(os, "environ", dict(given))
    grow_memory()
    assert os.environ == (given or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
