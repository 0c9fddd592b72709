"""Whole runs of two ranks each, run by ``runs.py``: exit codes, messages and files."""

import gzip
import json
import re
import signal

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpcrun.checkpoint.export import best_readable, load_model, newest_readable
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.diagnose.causes import first_cause, is_cascade
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.end.finalize import finalize
from hpcrun.lifecycle.policy import Budgets
from hpcrun.run.endings import read_failures, stacks_path
from hpcrun.run.events import Attempt, Cause, read_events
from hpcrun.run.io.files import read_json, read_lines
from hpcrun.train.data import order
from tests import jobs
from tests.train.forks import run_program
from tests.train.played import Runs

DONE = [[exitcodes.DONE] * 2]
STOPPED_ONCE = [[exitcodes.UNFINISHED] * 2, [exitcodes.DONE] * 2]
REFUSED = [[exitcodes.BAD_INPUT] * 2]
FAILED = [[exitcodes.FAILED] * 2]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_program("tests.train.runs", folder)
    return Runs(folder)


@pytest.mark.parametrize(
    "kind", ["", "-loaders", "-stream", "-own-stream", "-uneven", "-fsdp", "-powersgd"]
)
def test_a_stop_changes_no_bit_although_the_samples_are_random(runs, kind):
    assert runs.codes(f"calm{kind}") == DONE
    assert runs.codes(f"stopped{kind}") == STOPPED_ONCE
    undisturbed = jobs.final_state(runs.run(f"calm{kind}"))
    assert undisturbed
    assert jobs.final_state(runs.run(f"stopped{kind}")) == undisturbed


@pytest.mark.parametrize(("name", "computed"), [("stopped-float8", "!"), ("stopped-fsdp", "!!")])
def test_a_resume_computes_initial_weights_only_for_a_tasks_own_optimizer(runs, name, computed):
    if name == "stopped-float8":
        pytest.importorskip("torchao")
    assert runs.codes(name) == STOPPED_ONCE
    assert runs.run(name).path.with_name(f"{name}-draws").read_text() == computed


def test_layers_in_fp8_resume_with_the_same_bits(runs):
    pytest.importorskip("torchao")
    test_a_stop_changes_no_bit_although_the_samples_are_random(runs, "-float8")


@pytest.mark.parametrize("kind", ["", "-loaders", "-stream"])
def test_the_metrics_of_a_stopped_run_equal_those_of_an_undisturbed_run(runs, kind):
    calm, stopped = (
        {line["step"]: line["loss"] for line in read_lines(runs.run(name).metrics)}
        for name in (f"calm{kind}", f"stopped{kind}")
    )
    (event,) = (one for one in read_events(runs.run(f"stopped{kind}")) if one.what == "stopped")
    assert (event.step, list(stopped)) == (5, [2, 4, 6, 8])
    assert stopped == pytest.approx(calm, rel=1e-12)


def test_a_resume_may_compute_the_same_sums_in_another_way(runs):
    assert runs.codes("other-way") == STOPPED_ONCE
    last, other = (model_at_the_end(runs.run(name)) for name in ("calm-exact", "other-way"))
    assert last.keys() == other.keys()
    for name, value in last.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)
    (line,) = (
        line for line in runs.said("other-way").splitlines() if "different from when" in line
    )
    assert "train.micro_batch: None -> 1; train.parallel: auto -> fsdp; the samples and" in line
    assert "different from when" not in runs.said("stopped")


def test_a_resume_in_another_environment_says_so_and_strict_refuses_it(runs):
    change = "ONEDNN_MAX_CPU_ISA: none -> DEFAULT"
    (line,) = (
        line for line in runs.said("stopped").splitlines() if "environment has changed" in line
    )
    assert line.startswith(
        f"hpcrun: the environment has changed since step 5 was saved: {change}; the last bits"
    )
    assert "environment has changed" not in runs.said("other-way")
    assert runs.codes("strict") == [[75, 75], [2, 2]]
    refused = runs.said("strict").splitlines()[-1]
    assert "train.deterministic=strict: different from when step 5 was saved: " + change in refused
    assert refused.endswith("with train.deterministic=true")
    assert runs.codes("stopped-own-stream") == STOPPED_ONCE
    told = "hpcrun: step 5 was saved without a record of ONEDNN_MAX_CPU_ISA; if one of these has"
    assert told in runs.said("stopped-own-stream")


def test_the_report_is_of_the_best_weights_and_the_last_stay_the_newest(runs):
    assert runs.codes("best") == DONE
    result = read_json(runs.run("best").result)
    assert (result["steps"], result["validation_loss"]) == (10, 2.0)
    assert (result["best"], result["report_step"]) == ({"step": 6, "validation_loss": 1.0}, 6)
    best = model_at_the_end(runs.run("best"), best_readable, averaged=True)
    asked, weight = best["asked"].item(), best["body.weight"].sum().item()
    assert result["report"] == {"weight": weight, "asked": asked, "loss": 1.0}
    assert asked == 6
    assert "hpcrun: the report is for step 6, the best; 10 is the last\n" in runs.said("best")
    assert model_at_the_end(runs.run("best"))["asked"] == 10


def model_at_the_end(run, which=newest_readable, **options):
    store = CheckpointStore(run.checkpoints, "test-0")
    return load_model(store, which(store), **options)


def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_run_resumes_there(runs):
    told = [event for event in read_events(runs.run("stopped")) if event.what == "stopped"]
    started = [event for event in read_events(runs.run("stopped")) if event.what == "started"]
    assert [event.step for event in told] == [event.step for event in started[1:]]
    assert told[0].fields["committed"]


def test_the_samples_per_rank_are_logged_at_each_start(runs):
    said = runs.said("stopped-uneven").splitlines()
    lines = [line for line in said if line.startswith("hpcrun: ") and "samples" in line]
    assert lines == 2 * [
        "hpcrun: batch of 9: 2 ranks x 2 micro-batches x 2 or 3 samples, weighted by samples",
        "hpcrun: epoch of 24 samples: 3 steps; the last one has 6 samples, "
        "and empty ranks compute padding of weight 0",
    ]


def test_metrics_have_the_learning_rate_of_the_step(runs):
    lines = read_lines(runs.run("calm").metrics)
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    # Two steps of warm-up: the second is taken at the peak.
    assert lines[0]["lr"] == pytest.approx(3e-4)
    assert lines[-1]["lr"] > 3e-5


def test_auto_logs_its_estimate_once(runs):
    (line,) = (line for line in runs.said("calm").splitlines() if "train.parallel=auto" in line)
    # 65 weights of four bytes: with gradients and two moments four times as much.
    assert "chooses ddp: " in line
    assert "= 1.0 kB per rank" in line
    assert "train.parallel=auto" not in runs.said("calm", rank=1) + runs.said("calm-fsdp")
    for name, parallel in (("calm", "ddp"), ("stopped-fsdp", "fsdp")):
        started = [event for event in read_events(runs.run(name)) if event.what == "started"]
        assert {event.fields["parallel"] for event in started} == {parallel}


def test_a_sharded_model_is_validated_and_reported_on_as_a_whole(runs):
    result = read_json(runs.run("calm-fsdp").result)
    assert result["report"] == {"module": "Sequential", "weights": 65, "output": 2, "step": 8}
    assert result == read_json(runs.run("stopped-fsdp").result) | {"time": result["time"]}
    lines = read_lines(runs.run("calm-fsdp").metrics)
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6, 8]


@pytest.mark.parametrize("name", ["stopped-uneven", "stopped-fsdp"])
def test_a_tasks_own_optimiser_keeps_its_groups_and_their_rates(runs, name):
    state = jobs.final_state(runs.run(name))
    rates = {value for key, value in state.items() if key.endswith("initial_lr")}
    assert rates == {"0.01", "0.001"}
    scheduled = {value for key, value in state.items() if "base_lrs" in key}
    assert scheduled == rates


@pytest.mark.parametrize("name", ["raises-ddp", "raises-fsdp"])
def test_a_rank_that_raises_in_a_step_ends_the_others_and_is_the_cause(runs, name):
    assert runs.codes(name) == FAILED
    failures = runs.failures(name)
    assert (failures[1].kind, failures[1].step) == ("ValueError", 1 if "ddp" in name else 2)
    assert is_cascade(failures[0])


def test_a_rank_killed_in_the_broadcast_of_a_restore_ends_the_others_as_a_consequence(runs):
    name = "killed-restoring"
    assert runs.codes(name) == [STOPPED_ONCE[0], [exitcodes.FAILED, -signal.SIGKILL]]
    (failure,) = read_failures(runs.run(name).attempt_logs(name, 1))
    assert is_cascade(failure)
    # The end of the connection shows at once; a timeout would name none.
    assert "hpcrun: rank 0 lost its peers: " in runs.said(name)
    assert "onnection" in runs.said(name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("unused", "find_unused_parameters: the loss does not depend on spare.weight"),
        ("gives-two", "hpcrun: GivesTwo.loss() returned a tuple; return one "),
    ],
)
def test_an_untrainable_loss_is_reported_once_before_the_first_step(runs, name, line):
    assert runs.codes(name) == REFUSED
    assert line in runs.said(name)
    assert runs.said(name, rank=1) == ""


def test_validation_is_logged_at_its_steps_and_ends_in_the_result(runs):
    lines = read_lines(runs.run("validated").metrics)
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6, 8]
    result = read_json(runs.run("validated").result)
    assert (result["state"], result["steps"]) == ("finished", 8)
    assert result["validation_loss"] > 0


def test_a_model_may_depend_on_data_that_rank_0_prepares(runs):
    assert runs.codes("model-needs-data") == DONE


def test_fewer_samples_than_a_batch_are_enough(runs):
    assert runs.codes("few-samples") == DONE


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("prepare-refuses", "data.path: there is nothing at /nowhere; download it first"),
        (
            "no-such-task",
            "task: tests.train.zoo:Absent: tests.train.zoo has no Absent; name one of",
        ),
        ("nothing-to-validate", "data: Noisy holds no samples; check the data options"),
        ("stream", "data: Stream is a stream without state_dict and load_state_dict, so "),
        ("single", "train.parallel: single, but 2 ranks were started"),
        ("no-such-class", "fsdp.classes: Sequential has no Layer; it has BatchNorm1d, Dropout,"),
        ("float8-on-cpu", "train.float8: the CPU has no matrix products in fp8 (NVIDIA GPUs have"),
        ("too-few", "train.batch_size: 3 samples are too few for the 2 ranks that were started"),
    ],
)
def test_bad_input_gets_its_one_line_and_exit_code_2_on_every_rank(runs, name, line):
    assert runs.codes(name) == REFUSED
    assert runs.refusal(name).startswith(line)
    assert not runs.run(name).result.exists()
    assert not any(runs.run(name).checkpoints.iterdir())


def test_an_error_only_of_rank_1_is_reported_by_rank_0(runs):
    assert runs.codes("dataset-missing") == REFUSED
    line = runs.refusal("dataset-missing")
    assert line.startswith("rank 1 (")
    assert line.endswith("): data.path: there is nothing at /scratch")


@pytest.mark.parametrize(
    ("name", "culprit", "kind"),
    [("prepare-raises", 0, "OSError"), ("model-raises", 1, "ValueError")],
)
def test_a_failure_of_one_rank_ends_all_ranks_and_keeps_its_reason(runs, name, culprit, kind):
    assert runs.codes(name) == FAILED
    failures = runs.failures(name)
    assert failures[culprit].kind == kind
    assert failures[1 - culprit].kind == "PeerFailed"
    assert "Traceback" in runs.said(name, rank=culprit)
    assert "Traceback" not in runs.said(name, rank=1 - culprit)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("report-raises", "ReportRaises.report() raised KeyError: 'accuracy'"),
        ("report-tensor", "ReportHoldsTensor.report() raised TypeError: "),
    ],
)
def test_a_failing_report_does_not_fail_a_finished_run(runs, name, reason):
    assert runs.codes(name) == DONE
    result = read_json(runs.run(name).result)
    assert (result["state"], result["report"]) == ("finished", {})
    assert result["report_error"].startswith(reason)
    assert reason in runs.said(name)


def test_a_trained_run_finishes_without_a_report_that_keeps_crashing(runs):
    *killed, last = runs.codes("report-killed")
    assert [codes[0] for codes in killed] == 2 * [-signal.SIGKILL]
    assert last == [exitcodes.DONE] * 2
    result = read_json(runs.run("report-killed").result)
    assert (result["state"], result["steps"], result["report"]) == ("finished", 4, {})
    assert result["validation_loss"] > 0
    assert result["report_error"].startswith("none: 2 attempts ended while making it (rest")


def test_a_task_that_exits_with_0_does_not_count_as_finished(runs):
    assert runs.codes("exits-with-zero") == FAILED
    assert "SystemExit" in runs.kinds("exits-with-zero")
    assert not runs.run("exits-with-zero").result.exists()


@pytest.mark.parametrize("name", ["loaders-failure", "loaders-hang"])
def test_a_rank_that_fails_ends_although_its_loader_processes_ignore_sigterm(runs, name):
    assert runs.codes(name) == FAILED
    assert "ValueError" in runs.kinds(name)
    # The hanging loader sleeps for ten minutes.
    assert runs.seconds(name) < 400


def test_steps_that_are_not_finite_on_one_rank_are_skipped_on_all_and_traced_to_their_samples(runs):
    assert runs.codes("skips") == DONE
    run = runs.run("skips")
    (event,) = (one for one in read_events(run) if one.what == "nonfinite")
    # The first call of the loss is DDP's bucket warm-up, so the fourth call is of step 2.
    assert (event.step, event.fields["ranks"]) == (2, [1])
    dump = read_json(run.nonfinite(2))
    assert [isinstance(rank["loss"], float) for rank in dump["ranks"]] == [True, False]
    assert dump["ranks"][1]["loss"] == "nan"
    taken = order.samples(np.arange(16, 24), 24, seed=0).tolist()
    assert [rank["samples"] for rank in dump["ranks"]] == [[taken[:4]], [taken[4:]]]
    assert "skipped step 2: gradients are not finite; the loss of rank 1" in runs.said("skips")
    assert [line.get("skipped") for line in read_lines(run.metrics)] == [None, 2, 2, 2]


def test_the_effect_of_a_precision_on_this_device_is_logged_once(runs):
    (line,) = (line for line in runs.said("skips").splitlines() if "tf32" in line)
    assert line.endswith("this device computes in fp32")
    assert "tf32" not in runs.said("skips", rank=1)


def test_gradients_that_stay_not_finite_end_the_run_with_the_rank_they_come_from(runs):
    assert runs.codes("not-finite") == FAILED
    failures = runs.failures("not-finite")
    assert (failures[1].kind, failures[1].step) == ("NotFinite", 3)
    assert "at step 3, 2 consecutive steps (train.nonfinite_limit)" in failures[1].message
    cause = first_cause(list(failures.values()), [])
    assert (cause.rank, cause.step, cause.cascade) == (1, 3, 1)
    assert read_json(runs.run("not-finite").nonfinite(3))["in_a_row"] == 2
    # The last record is written right before the end.
    assert [line["step"] for line in read_lines(runs.run("not-finite").metrics)] == [2, 4]


def test_a_nan_weight_is_reported_with_its_rank(runs):
    assert runs.codes("no-number") == FAILED
    failure = runs.failures("no-number")[1]
    assert (failure.kind, failure.step) == ("NotFinite", 2)
    assert "the task's weight of micro-batch 0 of rank 1 on" in failure.message
    assert is_cascade(runs.failures("no-number")[0])


def test_each_rank_is_profiled_in_the_window_with_its_costly_operations(runs):
    folder = runs.run("watched").profile
    for rank in (0, 1):
        with gzip.open(folder / f"trace-rank-{rank:05d}.json.gz") as stream:
            names = [event.get("name") for event in json.load(stream)["traceEvents"]]
        # Two steps of two linear layers.
        assert names.count("aten::addmm") == 4
        assert "aten::addmm" in (folder / f"operations-rank-{rank:05d}.txt").read_text()
    assert runs.said("watched").count("profile of steps 2-3") == 1


def test_tensorboard_has_every_logged_step_once_although_the_run_was_stopped(runs):
    accumulator = EventAccumulator(str(runs.run("watched").tensorboard))
    accumulator.Reload()
    written = {event.step: event.value for event in accumulator.Scalars("loss")}
    lines = {line["step"]: line["loss"] for line in read_lines(runs.run("watched").metrics)}
    assert written == pytest.approx(lines)
    assert [event.step for event in accumulator.Scalars("mfu")] == sorted(lines)


def test_a_line_of_metrics_has_the_times_and_the_slowest_rank(runs):
    line = read_lines(runs.run("watched").metrics)[-1]
    # 8 samples x (4 x 8 + 8 weights) x 2 operations x 3 passes, on two devices of 1 GFLOP/s.
    assert line["mfu"] == pytest.approx(8 * 40 * 6 / line["step_time"] / 2e9, rel=0.01)
    assert 0 < line["data_wait"] < line["step_time"]
    assert line["slowest_own_time"] >= line["fastest_own_time"] > 0
    assert line["slowest_rank"] in (0, 1)
    assert line["memory_gb"] > 0.01


def test_the_first_line_excludes_the_time_before_the_first_step(runs):
    run = runs.run("watched")
    began = next(event.time for event in read_events(run) if event.what == "started")
    first = read_lines(run.metrics)[0]
    assert first["step_time"] * first["step"] <= first["time"] - began + 0.01


def test_no_rank_leaves_before_the_metrics_are_sent(runs):
    # srun would kill it soon after rank 0's end: once at the stop, once at the end.
    assert runs.codes("uploads") == [[exitcodes.UNFINISHED] * 2, [exitcodes.DONE] * 2]
    order = (runs.run("uploads").path.parent / "uploads-order").read_text().split()
    assert order == ["uploaded", "left"] * 2


def test_a_rank_out_of_memory_prints_advice(runs):
    assert runs.codes("out-of-memory") == FAILED
    failure = runs.failures("out-of-memory")[1]
    assert failure.kind == "OutOfMemory"
    assert "zoo.py" in failure.where
    assert "train.micro_batch=2 computes 2 samples at a time instead of 4" in failure.message
    run, attempt = runs.run("out-of-memory"), Attempt("out-of-memory", 0)
    classification = finalize(run, attempt, exitcodes.FAILED, Budgets(same_step=1))
    assert "rank 1 on" in classification.line
    assert ": out of memory: CUDA out of memory. Tried to allocate 2.00 GiB." in classification.line
    assert not classification.decision.restart
    assert "restarts.same_step" in classification.decision.reason


def test_a_rank_that_waits_for_a_failed_rank_ends_in_seconds(runs):
    assert runs.codes("peer-fails") == [[exitcodes.FAILED, exitcodes.FAILED]]
    assert "rank 0 waits for a rank that has failed; it ends" in runs.said("peer-fails")
    assert "no progress" not in runs.said("peer-fails")
    assert {rank: it.kind for rank, it in runs.failures("peer-fails").items()} == {1: "ValueError"}


def test_a_recompilation_in_a_later_step_is_no_hang(runs):
    assert runs.codes("recompiles") == DONE
    assert "no progress" not in runs.said("recompiles") + runs.said("recompiles", rank=1)
    assert runs.seconds("recompiles") > 8


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("hangs", exitcodes.FAILED, r"rank 1 on \S+ is behind, training at zoo\.py:\d+ in mishap"),
        # No thread of this process can end it; the watchdog process does.
        ("hangs-holding-lock", -signal.SIGKILL, r"rank 1 on \S+ does not answer"),
    ],
)
def test_a_rank_that_hangs_is_named_its_stack_kept_and_the_run_ended_to_start_again(
    runs, name, code, told
):
    assert runs.codes(name) == [[exitcodes.FAILED, code]]
    folder = runs.run(name).attempt_logs(name, 0)
    assert "in mishap" in stacks_path(folder, 1).read_text()
    assert "in training_step" in stacks_path(folder, 0).read_text()
    assert (folder / "flight-gloo-rank-0").stat().st_size
    classification = finalize(runs.run(name), Attempt(name, 0), exitcodes.FAILED, Budgets())
    assert (classification.cause, classification.decision.restart) == (Cause.HANG, True)
    assert re.search(f"no progress for 5 s in step 2: {told}$", classification.line), (
        classification.line
    )


@pytest.mark.parametrize("at", ["prepare", "backward", "validation", "rank-1"])
def test_a_kernel_refused_by_determinism_is_bad_input_at_any_step(runs, at):
    name = f"kernel-{at}"
    # Of two ranks at the kernel, one may be gone before the other has its last gradients.
    (codes,) = runs.codes(name)
    assert exitcodes.BAD_INPUT in codes
    assert "Traceback" not in runs.said(name) + runs.said(name, rank=1)
    line = (
        runs.said(name, rank=codes.index(exitcodes.BAD_INPUT))
        .splitlines()[-1]
        .partition("train.deterministic: ")[2]
    )
    assert re.match(
        r"torch has no deterministic implementation of put_, called at \S+zoo.py:", line
    )
    assert "train.deterministic=warn" in line
    classification = finalize(runs.run(name), Attempt(name, 0), max(codes), Budgets())
    assert (classification.cause, classification.decision.restart) == (Cause.BAD_INPUT, False)
    assert classification.line.endswith(line)


def test_a_kernel_that_torch_only_warns_about_is_used(runs):
    assert runs.codes("kernel-warned") == DONE
    assert "put_ does not have a deterministic implementation" in runs.said("kernel-warned")


def test_a_run_in_which_nothing_hangs_keeps_no_stacks(runs):
    assert not list(runs.run("calm").logs.glob("*/*/stacks-*"))
