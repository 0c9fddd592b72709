"""The faults: small changes of GPU code that a person could make by mistake, with the tests that must fail.

Each text to replace occurs once in its file; ``tests/tools/test_gpu_faults.py`` checks this.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    ``file``: path under ``hpcrun/``. ``edits``: old and new text, each old text once in the file. ``tests``:
    arguments of pytest.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


LATE = ("tests/devices/test_late_device.py",)
FAKE = ("tests/devices/test_fake_gpus.py", "-k", "each_pair and single")
START = ("tests/train/runs/test_gpu_runs.py",)

FAULTS = (
    # Steps
    Fault(
        "the event of a decision is recorded before its copy",
        "train/step/gate.py",
        (
            (
                '        """Start the copy; ``found`` may change afterwards."""\n',
                "        if self._event is not None:\n"
                "            accelerator.record(self._event, found.device)\n",
            ),
            (
                "not be the current device.\n"
                "            accelerator.record(self._event, found.device)\n",
                "not be the current device.\n            pass\n",
            ),
        ),
        LATE,
    ),
    Fault(
        "a decision is read before its copy has ended",
        "train/step/gate.py",
        (("            self._event.synchronize()\n", "            pass\n"),),
        LATE,
    ),
    Fault(
        "fused optimizers of other libraries decide on the GPU",
        "train/step/gate.py",
        (('type(optimizer).__module__.startswith("torch.optim.")', "True"),),
        ("tests/train/step/test_precision.py", "-k", "foreign_optimizer"),
    ),
    Fault(
        "fused SGD decides on the GPU before its momentum exists",
        "train/step/gate.py",
        ((" and _started(optimizer)", ""),),
        ("tests/train/step/test_precision.py", "-k", "first_gradient"),
    ),
    Fault(
        "the flag for gradients that are not finite is on the CPU",
        "train/step/gate.py",
        (("here = torch.zeros((), device=device)", "here = torch.zeros(())"),),
        FAKE,
    ),
    Fault(
        "the host reads each decision in its step",
        "train/step/gate.py",
        (("and _started(optimizer)", "and not _started(optimizer)"),),
        LATE,
    ),
    Fault(
        "the host reads the norm of the gradients",
        "train/step/gate.py",
        (("if norm.device.type not in self.late_on:", "if True:"),),
        FAKE,
    ),
    Fault(
        "the host waits for the last decision before it queues a step",
        "train/step/amp_trainer.py",
        (
            (
                "        self._clear()\n        self._weights",
                "        _ = self.scheduler\n        self._clear()\n        self._weights",
            ),
        ),
        LATE,
    ),
    Fault(
        "a batch is copied to the GPU while the host waits",
        "train/step/precision.py",
        (("batch.to(device, non_blocking=True)", "batch.to(device)"),),
        LATE,
    ),
    Fault(
        "the host reads the loss of each micro-batch",
        "train/step/amp_trainer.py",
        (("seen = value.detach().float()", "seen = torch.tensor(value.item())"),),
        FAKE,
    ),
    Fault(
        "a loss stays in the memory of a CUDA graph",
        "train/step/amp_trainer.py",
        (("if self._replays_graphs:", "if False:"),),
        ("tests/train/step/test_trainer.py", "-k", "cuda_graph"),
    ),
    Fault(
        "several micro-batches are compiled with CUDA graphs",
        "train/build.py",
        (("if parts == 1 or", "if parts or"),),
        ("tests/train/step/test_trainer.py", "-k", "cuda_graphs"),
    ),
    Fault(
        "autocast is for the CPU only",
        "train/step/amp_trainer.py",
        (("torch.autocast(self.device.type, dtype=dtype)", 'torch.autocast("cpu", dtype=dtype)'),),
        FAKE,
    ),
    Fault(
        "fp32 convolutions use TensorFloat-32",
        "devices/vendor.py",
        (("torch.backends.cudnn.allow_tf32 = False", "pass"),),
        ("tests/train/step/test_precision.py", "-k", "fp32_is_fp32"),
    ),
    # Loop
    Fault(
        "the host reads the loss of each step for the metrics",
        "train/metrics/log.py",
        (
            (
                "        self._window.results.append(result)\n",
                "        self._window.results.append(result)\n        result.loss.item()\n",
            ),
        ),
        LATE,
    ),
    Fault(
        "the watch for non-finite gradients reads each decision",
        "train/health/nonfinite.py",
        (
            (
                "        self._results.append(result)\n",
                "        self._results.append(result)\n        _ = result.skipped\n",
            ),
        ),
        LATE,
    ),
    Fault(
        "times are read before the GPU has finished",
        "train/metrics/log.py",
        (
            ("steps, loss = len(results), self._window.mean()\n", "steps = len(results)\n"),
            (
                "        lap = self._watch.lap(steps)\n",
                "        lap = self._watch.lap(steps)\n        loss = self._window.mean()\n",
            ),
        ),
        LATE,
    ),
    Fault(
        "the profiler stops before the GPU has finished",
        "train/metrics/timing.py",
        (("            accelerator.synchronize(self._device)\n", ""),),
        LATE,
    ),
    Fault(
        "the loader's memory is not page-locked",
        "train/setup.py",
        (("pin_memory=is_accelerator(resumed.trainer.device)", "pin_memory=False"),),
        LATE,
    ),
    # Start and groups
    Fault(
        "NCCL's variables are set after the group is made",
        "train/session.py",
        (
            ("    choose_kernels(config.train.deterministic)\n", ""),
            (
                "    ranks = process_group.control_ranks(distributed)\n",
                "    choose_kernels(config.train.deterministic)\n"
                "    ranks = process_group.control_ranks(distributed)\n",
            ),
        ),
        START,
    ),
    Fault(
        "the device is chosen after the group is made",
        "train/parallel/process_group.py",
        (
            ("check_address=not meets)\n    select_device(config)\n", "check_address=not meets)\n"),
            (
                "        timeout=datetime.timedelta(seconds=timeout),\n    )\n    return config\n",
                "        timeout=datetime.timedelta(seconds=timeout),\n    )\n"
                "    select_device(config)\n    return config\n",
            ),
        ),
        START,
    ),
    Fault(
        "the GPUs connect without a synchronization",
        "train/parallel/process_group.py",
        (("        accelerator.synchronize(device)\n", ""),),
        START,
    ),
    Fault(
        "the GPUs do not connect before the model is built",
        "train/session.py",
        (("process_group.connect(process_group.select_device(distributed))", "pass"),),
        START,
    ),
    Fault(
        "the groups of a hybrid mesh do not connect",
        "train/parallel/fsdp.py",
        (
            (
                "    for group in mesh.get_all_groups():\n",
                "    for group in mesh.get_all_groups()[:1]:\n",
            ),
        ),
        ("tests/train/parallel/test_parallel.py", "-k", "hybrid_mesh"),
    ),
    Fault(
        "NCCL's timeout is not raised",
        "train/parallel/process_group.py",
        (
            (
                "for group in waiting for device in group._device_types]",
                'for group in waiting for device in group._device_types if device.type == "cpu"]',
            ),
        ),
        ("tests/train/health/test_watchdog.py", "-k", "all_groups"),
    ),
    Fault(
        "the last barrier uses the group of the GPUs",
        "train/session.py",
        (("dist.barrier(group=ranks.group)", "dist.barrier()"),),
        START,
    ),
    Fault(
        "metrics are gathered on the group of the GPUs",
        "train/metrics/log.py",
        (
            ("dist.gather(mine, group=self._ranks.group)", "dist.gather(mine)"),
            ("dist.gather(mine, found, group=self._ranks.group)", "dist.gather(mine, found)"),
        ),
        START,
    ),
    Fault(
        "a tensor is broadcast with its own strides and type",
        "train/parallel/strategies.py",
        (
            (
                "dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)",
                "dist.broadcast(value, src=0)",
            ),
        ),
        ("tests/train/parallel/test_nccl_rules.py", "-k", "any_tensor"),
    ),
    # Memory and checkpoints
    Fault(
        "a snapshot is read before its copies have ended",
        "checkpoint/sharded/host_staging.py",
        (("        accelerator.synchronize_stream(device)\n", "        pass\n"),),
        LATE,
    ),
    Fault(
        "the snapshot's memory is not page-locked",
        "train/saving.py",
        (("bool(distributed.device_ids)", "False"),),
        LATE,
    ),
    Fault(
        "the memory of a snapshot is reused while it is written",
        "checkpoint/sharded/engine.py",
        (
            (
                "        ended = self._join()\n"
                "        self._unreported += [ended] if ended else []\n"
                "        job = self._snapshot(",
                "        job = self._snapshot(",
            ),
            (
                "        straight = isinstance(",
                "        ended = self._join()\n        self._unreported += [ended] if ended else []\n"
                "        straight = isinstance(",
            ),
        ),
        ("tests/checkpoint/test_engine.py",),
    ),
    Fault(
        "state on the CPU is restored on the group of the GPUs",
        "checkpoint/sharded/copies.py",
        (("return _Holders(_CONTROL, ranks.group)", "return _Holders(_CONTROL, whole)"),),
        ("tests/checkpoint/test_shared_reading.py", "-k", "only_the_control_group"),
    ),
    Fault(
        "a refused page lock stays the thread's last error",
        "devices/vendor.py",
        (("        last_error()\n", ""),),
        ("tests/checkpoint/test_staging.py", "-k", "refused_page_lock"),
    ),
    Fault(
        "a checkpoint has the generator of one GPU only",
        "devices/accelerator.py",
        (("for step in range(visible)]", "for step in range(1)]"),),
        ("tests/devices/test_accelerator.py", "-k", "generators_of_all"),
    ),
    Fault(
        "an event is recorded on the stream of the current GPU",
        "devices/accelerator.py",
        (("torch.accelerator.current_stream(device))", "torch.accelerator.current_stream())"),),
        ("tests/devices/test_accelerator.py", "-k", "event"),
    ),
)
