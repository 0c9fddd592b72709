"""NCCL's rules, imposed on gloo groups: gloo accepts calls that NCCL refuses or that hang with it.

Inside ``nccl_rules()`` every collective passes a check, from every caller: hpcrun, DDP's reducer in C++,
FSDP2 and DTensor. The check is a kernel of the c10d operations for a key that torch's dispatcher looks up
before it chooses the kernel of the device. It looks at the arguments and then calls the CPU kernel.

Processes of ``fork_ranks`` are under the rules too: :func:`recorded` writes their collectives to files, and
:func:`require_rules_kept` reads the files of all ranks.

Groups that are made with an explicit gloo backend are control groups and are exempt.
"""

import contextlib
import itertools
import json
import os
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from hpcrun import exit_codes

_PACKAGE = str(Path(__file__).parents[3] / "hpcrun")
_TORCH = str(Path(torch.__file__).parent)

# torch/csrc/distributed/c10d/NCCLUtils.cpp; complex numbers travel as pairs.
_DTYPES = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
}

# The calls of hpcrun on the gradients' groups, where tensors must be on the GPU. Gloo cannot check this: all
# tensors of these tests are on the CPU: a person has to look at each new place.
_PLACES = {
    "checkpoint/sharded/copies.py:broadcast",  # Its tensors are on the device of the group.
    "train/model/deferred.py:fill",  # The weights are on the device.
    "train/parallel/strategies.py:copy_from_rank_zero",
    "train/parallel/fsdp.py:make_mesh",  # Torch moves objects to the GPU.
    "train/parallel/process_group.py:connect",
    "train/step/weighting.py:loss_factors",
}

# Ranks may give these operations different tensors.
_OWN_SHAPES = {"gather_", "scatter_", "alltoall_", "alltoall_base_"}
_BETWEEN_TWO = {"send", "recv_", "recv_any_source_"}

_ENDED_TOGETHER = {0, exit_codes.UNFINISHED}
_FOREVER = contextlib.ExitStack()


class BreaksNCCL(AssertionError):
    """A collective that NCCL refuses, or that hangs or mixes up numbers with NCCL."""


class Rules:
    """The collectives of this rank so far, by the name of the device group."""

    installed = None
    """The rules of this process, or of the process from which it was forked."""

    def __init__(self):
        self.calls = {}
        self.exempt = set()
        self.off = False
        self._file = None

    def check(self, operation, arguments):
        """Raise BreaksNCCL if NCCL would refuse this call of a c10d operation."""
        group = _group(arguments)
        if self.off or group is None or group.group_name in self.exempt:
            return
        try:
            self._check(operation, arguments, group)
        except BreaksNCCL as error:
            self._write(None, str(error))
            raise

    def write_to(self, path):
        """Begin a new record, in a file too: a rank that is killed leaves its record there."""
        self.calls, self.exempt, self.off = {}, set(), False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def _write(self, group, call):
        if self._file is not None:
            os.write(self._file, json.dumps([group, call]).encode() + b"\n")

    def _check(self, operation, arguments, group):
        tensors = [*_tensors(arguments)]
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise BreaksNCCL(
                    f"{operation}: NCCL needs contiguous tensors, not the strides {tensor.stride()} "
                    f"of the shape {tuple(tensor.shape)}"
                )
            if tensor.dtype not in _DTYPES or tensor.is_sparse:
                raise BreaksNCCL(f"{operation}: NCCL knows no {tensor.dtype}, {tensor.layout}")
        place = _place()
        if place is not None and place not in _PLACES:
            raise BreaksNCCL(
                f"{operation}: {place} calls a collective on the group of the gradients. NCCL takes tensors "
                "on the GPU only; use the control group for decisions, or check the device and add the place"
            )
        if operation not in _BETWEEN_TWO:
            sizes = [] if operation in _OWN_SHAPES else [[*tensor.shape] for tensor in tensors]
            kinds = sorted({str(tensor.dtype) for tensor in tensors})
            call = f"{operation} {sizes} {kinds}"
            self.calls.setdefault(group.group_name, []).append(call)
            self._write(group.group_name, call)

    def compare(self):
        """Raise BreaksNCCL if ranks of a group have made different collectives. Collective."""
        self.off = True
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, self.calls)
        require_same_order(everything)


def require_same_order(everything):
    """Raise BreaksNCCL if the calls of two ranks in one group differ; ``everything``: calls by rank."""
    for name in {name for calls in everything for name in calls}:
        ranks = [rank for rank, calls in enumerate(everything) if name in calls]
        lines = [everything[rank][name] for rank in ranks]
        for number, calls in enumerate(itertools.zip_longest(*lines)):
            if len(set(calls)) > 1:
                told = "; ".join(f"rank {r}: {c}" for r, c in zip(ranks, calls, strict=True))
                raise BreaksNCCL(f"group {name}, collective {number}: {told}")


def recorded(path):
    """Check every collective of this process until it ends, and write all of them to the file ``path``.

    The process is a fork that will run as a rank; it has no process group yet.
    """
    rules = Rules.installed or _FOREVER.enter_context(nccl_rules())
    rules.write_to(path)


def require_rules_kept(paths, codes):
    """Raise BreaksNCCL for the records of ranks with these exit codes.

    Ranks that failed, or did not end for the same reason, may have made different collectives.
    """
    everything = []
    for path in paths:
        calls = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            group, call = json.loads(line)
            if group is None:
                raise BreaksNCCL(f"{path.name}: {call}")
            calls.setdefault(group, []).append(call)
        everything.append(calls)
    if len(set(codes)) == 1 and codes[0] in _ENDED_TOGETHER:
        require_same_order(everything)


@contextlib.contextmanager
def nccl_rules():
    """Check every collective of the block, and at its end that all ranks made the same ones. Collective.

    The process group exists already. Yields the Rules; raises BreaksNCCL in the call that breaks a rule.
    """
    rules = Rules()
    library, new_group = torch.library.Library("c10d", "IMPL"), dist.new_group

    def noted_group(*arguments, backend=None, **options):
        made = new_group(*arguments, backend=backend, **options)
        if backend is not None and isinstance(made, dist.ProcessGroup):
            rules.exempt.add(made.group_name)
        return made

    dist.new_group = noted_group
    before, Rules.installed = Rules.installed, rules
    try:
        for operation in _operations():
            _check(library, operation, rules)
        yield rules
        if not rules.off:
            rules.compare()
    finally:
        Rules.installed = before
        dist.new_group = new_group
        library._destroy()


def _check(library, operation, rules):
    overload = getattr(torch.ops.c10d, operation).default
    device = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def checked(_, *arguments):
        rules.check(operation, arguments)
        # Releases the interpreter's lock, for which gloo's threads may wait while they hold their own lock.
        return overload.redispatch(device, *arguments)

    library.impl(operation, checked, "BackendSelect", with_keyset=True)


def _operations():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = {name.removeprefix("c10d::") for name in registered if name.startswith("c10d::")}
    return sorted(names - {"check_for_nan", "monitored_barrier_"})


def _group(arguments):
    """Return the process group among the arguments, which may hold a reduction's operator too."""
    for value in arguments:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return dist.ProcessGroup.unbox(value)
    return None


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _place():
    """Return ``file:function`` of hpcrun's direct call of torch.distributed; None for other callers."""
    frame = sys._getframe(1)
    while frame is not None:
        inside, here = _known(frame.f_code.co_filename)
        if not inside:
            return here and f"{here}:{frame.f_code.co_name}"
        frame = frame.f_back
    return None


@cache
def _known(file):
    """Return if a file is between a caller and its collective, and its path in hpcrun, or None."""
    if file == __file__ or file.startswith("<"):
        return True, None
    if file.startswith(_TORCH):
        return file.endswith(("distributed_c10d.py", "c10d_logger.py", "_ops.py")), None
    return False, file.removeprefix(f"{_PACKAGE}/") if file.startswith(_PACKAGE) else None
