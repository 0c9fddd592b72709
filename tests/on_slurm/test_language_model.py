"""The built-in language model on several hosts: a preemption and a killed rank change no bit."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from .cluster import PATIENCE
from .training import ROOT, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

PACKED = """
from pathlib import Path
from types import SimpleNamespace

from hpcrun.tasks.language_model import LanguageModel
from probe import Probe


class Packed(LanguageModel):
    def loss(self, model, batch):
        if model.training:
            own = {"log": str(Path(self.data.tokens[0]).parent)}
            Probe.wait_while_held(
                SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(own=own)))
            )
        return super().loss(model, batch)
"""

SETTINGS = {
    **{"task": "packed:Packed", "job.nodes": 2, "job.gpus": 2, "job.mem": "2G", "job.time": 30},
    **{"model.context": 64, "model.vocabulary": 512, "model.document_end": 3, "model.dropout": 0.1},
    **{"train.steps": 18, "train.batch_size": 16, "train.accumulation": 2, "train.log_every": 1},
    **{"train.parallel": "fsdp", "fsdp.shard": "hybrid", "train.validate_every": 0},
    **{
        "optim.warmup_steps": 4,
        "checkpoint.every": 4,
        "job.exclude_after": "null",
        "train.timeout": 600,
    },
}


def submit(bench: Bench, name: str) -> RunDirectory:
    changes = [f"{key}={value}" for key, value in SETTINGS.items()]
    config = str(ROOT / "configs" / "llama-tiny.yaml")
    bench.hpcrun(
        *("submit", "-c", config, "--name", name, "--cpu", "--executor", "slurm", "--detach"),
        *(*changes, f"data.tokens=[{bench.folder / 'tokens.bin'}]"),
    )
    return bench.run(name)


@pytest.mark.timeout(2400)
def test_interruptions_change_no_bit_of_a_packed_model(bench: Bench) -> None:
    drawn = np.random.default_rng(0).geometric(0.05, 40_000) + 2
    # A document has 20 tokens, a sample 64.
    assert 1500 < (drawn == 3).sum() < 2500
    (bench.folder / "tokens.bin").write_bytes(drawn.clip(max=511).astype("<u2").tobytes())
    (bench.folder / "packed.py").write_text(PACKED)
    cut = submit(bench, "cut")
    with bench.held_at(cut, 6):
        urgent = bench.slurm.sbatch(
            *("-p", "urgent", "-N4", "--exclusive", "--output=/dev/null"), "--wrap", "sleep 1"
        )
        bench.slurm.wait_state(urgent, timeout=PATIENCE)
    with bench.held_at(cut, 13, restart=1):
        (victim,) = bench.pids(cut, 3)
        os.kill(victim, signal.SIGKILL)
    assert bench.wait_for_end(cut) == "COMPLETED", bench.story(cut)
    assert bench.causes(cut) == ["preemption", "crash", "finished"], bench.story(cut)
    calm = submit(bench, "calm")
    assert bench.wait_for_end(calm) == "COMPLETED", bench.story(calm)
    assert bench.causes(calm) == ["finished"]
    assert jobs.events(calm, "started")[0].parallel == "fsdp"
    assert jobs.final_state(cut) == jobs.final_state(calm)
