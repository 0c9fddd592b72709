"""Whole runs that are stopped and resumed: they end with the weights and metrics of an undisturbed run."""

import os

import pytest
import torch

from hpcrun import get_rank
from hpcrun.checkpoint.export import newest_readable
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.run.files import read_json, read_lines
from hpcrun.storage.manifest import newest_manifest
from hpcrun.storage.store import CheckpointStore
from tests.support import jobs
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import (
    Exact,
    Noisy,
    Padded,
    Ragged,
    Regression,
    Short,
    Validated,
)
from tests.support.training.runs import DONE, STOPPED_ONCE, play_run


def play_both(folder, task, *overrides, stop_at=5, later=(), begin=None):
    """Return an undisturbed run and a stopped run, which must end with the same bits."""
    calm = play_run(folder, task, *overrides, *later, name="calm")
    stop = f"model.stop_at={stop_at}"
    stopped = play_run(folder, task, *overrides, stop, name="stopped", later=later, begin=begin)
    assert calm.codes == DONE, calm.said()
    assert stopped.codes == STOPPED_ONCE, stopped.said()
    undisturbed = jobs.final_state(calm.run)
    assert undisturbed
    assert jobs.final_state(stopped.run) == undisturbed
    return calm, stopped


def elsewhere(rank, restart):
    """Move a restart to another environment."""
    if restart:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "DEFAULT"


def loss_lines(played):
    return [line for line in read_lines(played.run.metrics) if "loss" in line]


def validated_steps(played):
    return [line["step"] for line in read_lines(played.run.metrics) if "validation_loss" in line]


def require_same_losses(calm, stopped):
    expected, losses = (
        {line["step"]: line["loss"] for line in loss_lines(played)} for played in (calm, stopped)
    )
    (event,) = stopped.events("stopped")
    assert (event.step, list(losses)) == (5, [2, 4, 6, 8])
    assert losses == pytest.approx(expected, rel=1e-12)


def model_at_the_end(played):
    store = CheckpointStore(played.run.checkpoints, "test-0")
    return StoredModel(store, newest_readable(store)).state()


@forked
def test_a_stop_changes_no_bit_although_the_samples_are_random(tmp_path):
    calm, stopped = play_both(tmp_path, Validated, "train.validate_every=3", begin=elsewhere)
    require_same_losses(calm, stopped)

    # A signal to one rank stops all ranks at one step, and the run resumes there.
    (told,) = stopped.events("stopped")
    assert [event.step for event in stopped.events("started")] == [0, told.step]
    assert told.committed

    # The restart is in another environment, with the same settings.
    assert stopped.line_with("environment has changed").startswith(
        "hpcrun: the environment has changed since step 5 was saved: "
        "ONEDNN_MAX_CPU_ISA: none -> DEFAULT; the last bits"
    )
    assert "different from when" not in stopped.said()

    # A line of metrics has the learning rate of its step: the second of two steps of warm-up is at the peak.
    lines = loss_lines(calm)
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert lines[0]["lr"] == pytest.approx(3e-4)
    assert lines[-1]["lr"] > 3e-5

    # Validation is logged at its steps and ends in the result.
    assert validated_steps(calm) == [3, 6, 8]
    result = read_json(calm.run.result)
    assert (result["state"], result["steps"]) == ("finished", 8)
    assert result["validation_loss"] > 0

    # 65 weights of four bytes: with gradients and two moments four times as much.
    line = calm.line_with("train.parallel=auto")
    assert "chooses ddp: " in line
    assert "= 1.0 kB per rank" in line
    assert "train.parallel=auto" not in calm.said(rank=1)
    assert {event.parallel for event in calm.events("started")} == {"ddp"}

    # Nothing hangs, so no stacks are kept.
    assert not list(calm.run.logs.glob("*/*/stacks-*"))


class OneOrder(torch.utils.data.IterableDataset):
    """A stream of noisy samples, the same on every rank, 13 per pass."""

    shards_itself = False

    def __init__(self):
        self.samples, self.next = Noisy(13), 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def __iter__(self):
        while self.next < len(self.samples):
            self.next += 1
            yield self.samples[self.next - 1]
        self.next = 0


class OwnSamples(OneOrder):
    """The same stream, with a different length on each rank."""

    shards_itself = True

    def __init__(self):
        super().__init__()
        self.samples = Noisy(9 + 2 * get_rank())


class Streaming(Padded):
    def train_dataset(self):
        stream = OneOrder()
        stream.samples = Short(13)
        return stream


class StreamingItsOwn(Regression):
    def train_dataset(self):
        return OwnSamples()


@forked
def test_a_stop_changes_no_bit_while_loader_processes_read_ahead(tmp_path):
    # A person shortens the stopped run: until then the rate was the peak; from step 6 it decays.
    calm, stopped = play_both(
        tmp_path,
        Regression,
        *("data.workers=2", "train.accumulation=2", "train.steps=30", "optim.schedule=wsd"),
        stop_at=9,
        later=("train.steps=8", "optim.decay_steps=2"),
    )
    require_same_losses(calm, stopped)


@forked
def test_a_stop_changes_no_bit_in_a_stream(tmp_path):
    workers = ("data.workers=2", "train.accumulation=2")
    require_same_losses(*play_both(tmp_path, Streaming, *workers, stop_at=9))


@forked
def test_a_stop_changes_no_bit_in_a_sharding_stream(tmp_path):
    strict = play_run(
        tmp_path,
        StreamingItsOwn,
        *("model.stop_at=5", "train.deterministic=strict"),
        name="strict",
    )
    calm = play_run(tmp_path, StreamingItsOwn, name="calm")
    assert calm.codes == DONE, calm.said()
    assert strict.codes == STOPPED_ONCE, strict.said()
    undisturbed = jobs.final_state(calm.run)
    assert undisturbed
    assert jobs.final_state(strict.run) == undisturbed


RATES = {"0.01", "0.001"}


def rates(played):
    """Return the initial rates of the optimizer's groups, and those of the schedule."""
    state = jobs.final_state(played.run)
    initial = {value for key, value in state.items() if key.endswith("initial_lr")}
    return initial, {value for key, value in state.items() if "base_lrs" in key}


@forked
def test_a_stop_changes_no_bit_with_uneven_shares(tmp_path):
    # Five samples and four, at most three per micro-batch.
    _, stopped = play_both(
        tmp_path,
        Ragged,
        *("train.batch_size=9", "train.micro_batch=3", "train.ema=0.9"),
        *("train.validate_every=2", "train.patience=100"),
        stop_at=9,
    )
    said = stopped.said().splitlines()
    # Each start logs the samples per rank.
    assert [line for line in said if line.startswith("hpcrun: ") and "samples" in line] == 2 * [
        "hpcrun: batch of 9: 2 ranks x 2 micro-batches x 2 or 3 samples, weighted by samples",
        "hpcrun: epoch of 24 samples: 2.7 steps",
    ]
    assert rates(stopped) == (RATES, RATES)


class ReportsItsWeights(Validated):
    """A task with a report that calls the whole model on rank 0 only, and with an optimizer."""

    build_optimizer = Ragged.build_optimizer

    def report(self, model, validation_loss):
        with torch.no_grad():
            return {
                "module": type(model).__name__,
                "weights": sum(parameter.numel() for parameter in model.parameters()),
                "output": model.eval()(torch.ones(2, 4)).shape[0],
                "step": self.step,
            }


@forked
def test_a_stop_changes_no_bit_of_a_sharded_model(tmp_path):
    sharded = ("train.parallel=fsdp", "train.validate_every=3")
    calm, stopped = play_both(tmp_path, ReportsItsWeights, *sharded)
    assert rates(stopped) == (RATES, RATES)

    # The model is validated and reported on as a whole.
    result = read_json(calm.run.result)
    assert result["report"] == {"module": "Sequential", "weights": 65, "output": 2, "step": 8}
    assert result == read_json(stopped.run.result) | {"time": result["time"]}
    assert validated_steps(calm) == [3, 6, 8]

    assert "train.parallel=auto" not in calm.said()
    assert {event.parallel for event in stopped.events("started")} == {"fsdp"}


@forked
def test_a_resume_keeps_shards_within_nodes(tmp_path):
    keys = ("job.nodes=2", "train.parallel=fsdp", "train.deterministic=strict")
    asked = (*keys, "fsdp.shard=hybrid")
    calm = play_run(tmp_path, Exact, *asked, name="calm", nodes=[2], per_node=2)
    stopped = play_run(
        *(tmp_path, Exact, *asked, "model.stop_at=5"),
        later=("fsdp.shard=auto", "fsdp.reshard_after_forward=false"),
        nodes=[2, 2],
        per_node=2,
    )
    assert calm.codes == [[0] * 4], calm.said()
    assert stopped.codes == [[75] * 4, [0] * 4], stopped.said()
    assert jobs.final_state(stopped.run) == jobs.final_state(calm.run)
    assert "chooses hybrid, as in the last checkpoint" in stopped.said()
    manifests = [newest_manifest(played.run.checkpoints) for played in (calm, stopped)]
    assert {each.meta["ways"]["fsdp.shard"] for each in manifests} == {"hybrid"}


@forked
def test_another_number_of_ranks_chooses_shards_again(tmp_path):
    played = play_run(
        *(tmp_path, Exact, "job.nodes=2-3", "train.parallel=fsdp", "fsdp.shard=hybrid"),
        "model.stop_at=5",
        later=("fsdp.shard=auto",),
        nodes=[2, 3],
        per_node=2,
    )
    assert played.codes == [[75] * 4, [0] * 6], played.said()
    assert "fsdp.shard: hybrid -> full" in played.line_with("different from when")
    assert newest_manifest(played.run.checkpoints).meta["ways"]["fsdp.shard"] == "full"


@forked
def test_a_resume_may_compute_the_same_sums_in_another_way(tmp_path):
    calm = play_run(tmp_path, Exact, name="calm")
    other = play_run(
        tmp_path,
        Exact,
        *("model.stop_at=17", "train.micro_batch=1"),
        name="other",
        later=(
            *("train.micro_batch=2", "train.activation_checkpointing=full"),
            *(
                "train.parallel=fsdp",
                "optim.fused=false",
                "train.log_every=1",
                "watch.tensorboard=false",
            ),
        ),
    )
    assert calm.codes == DONE, calm.said()
    assert other.codes == STOPPED_ONCE, other.said()
    last, values = model_at_the_end(calm), model_at_the_end(other)
    assert last.keys() == values.keys()
    for name, value in last.items():
        torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-6)
    line = other.line_with("different from when")
    assert "train.micro_batch: 1 -> 2; train.parallel: auto -> fsdp; the samples and" in line
    line = other.line_with("the config has changed since")
    assert line.endswith("since step 5 was saved: train.log_every: 2 -> 1")
    assert "environment has changed" not in other.said()


@forked
def test_a_resume_refuses_a_config_that_trains_something_else(tmp_path):
    other = ("seed=1", "train.batch_size=16", "train.log_every=1")
    played = play_run(tmp_path, Exact, "model.stop_at=5", later=other)
    assert played.codes == [[75, 75], [2, 2]], played.said()
    line = (
        f"{played.run.config}: cannot continue from step 5, which was saved with another config: "
    )
    refused = played.said().splitlines()[-1]
    assert refused.startswith(f"hpcrun: {line}seed: 0 -> 1; train.batch_size: 8 -> 16; put the old")
    (event,) = played.events("bad-input")
    assert event.certain
    assert CheckpointStore(played.run.checkpoints, "test-0").steps() == [5, 3]


@forked
def test_strict_refuses_a_resume_in_another_environment(tmp_path):
    strict = ("model.stop_at=5", "train.deterministic=strict")
    played = play_run(tmp_path, Exact, *strict, begin=elsewhere)
    assert played.codes == [[75, 75], [2, 2]], played.said()
    refused = played.said().splitlines()[-1]
    assert (
        "train.deterministic=strict: different from when step 5 was saved: "
        "ONEDNN_MAX_CPU_ISA: none -> DEFAULT" in refused
    )
    assert refused.endswith("with train.deterministic=true")
