"""Put one rank's training together from the config, and run it."""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from hpcrun.checkpoint.interval import EverySteps
from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.saver import Saver
from hpcrun.config import Config, parallelism, recorded
from hpcrun.devices import accelerator
from hpcrun.ranks.collective import StopAgreement
from hpcrun.ranks.deadline import DeadlineWatch, asked_end, given_end
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.fork_client import offer_own_state
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.run.attempt import Attempt, number_columns
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.run.journal.events import Started
from hpcrun.run.journal.journal import Journal
from hpcrun.train.data.batching import Batching, accumulation_of, count_line, worker_processes
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.determinism import announce_order, choose_kernels, explain_refusals
from hpcrun.train.ending import finished, stopped
from hpcrun.train.garbage import Collection, collecting_together
from hpcrun.train.health import hang_diagnosis
from hpcrun.train.health.nonfinite import NonFiniteWatch, samples_of
from hpcrun.train.health.slow_nodes import SlowNodeWatch
from hpcrun.train.health.watchdog import watching
from hpcrun.train.learning_rate import learning_rate_lines
from hpcrun.train.metrics.log import MetricsLog, measure
from hpcrun.train.metrics.sinks import build_sinks
from hpcrun.train.metrics.timing import Profile
from hpcrun.train.parallel import process_group
from hpcrun.train.position import CONNECTING, TRAINING, VALIDATING, Position, showing_compilation
from hpcrun.train.saving import SaveReports, build_engine, build_interval, content_of
from hpcrun.train.setup import (
    Context,
    OpenedTask,
    Resumed,
    build_batches,
    build_model,
    open_task,
)
from hpcrun.train.step.checkpoints import saver_of
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.precision import faster
from hpcrun.train.step.trainer import DistributedAMPTrainer, StepResult
from hpcrun.train.validation import EarlyStopping, ValidationData, validate


@dataclass(frozen=True)
class Loop:
    """Parts of the loop; session.py makes them."""

    config: Config
    steps: range
    batches: Generator[MicroBatches, None, None]
    take: Callable[[int, MicroBatches], StepResult]
    agreement: StopAgreement
    reason_to_stop: Callable[[], StopReason]
    validate: Callable[[], float | None]
    early: EarlyStopping
    metrics: MetricsLog
    saver: Saver
    nonfinite: NonFiniteWatch
    profile: Profile
    position: Position

    def run(self) -> StopReason:
        """Train to the end, or until all ranks agree to stop; return the reason (NONE: the end).

        On return the last step is committed, unless ``saver.failed`` says why not.
        """
        with collecting_together(self.config.train.log_every) as collection:
            stop = self._run(collection)
        # Only now: a preempted job may have half a minute, and the checkpoint comes first.
        self.profile.close()
        return stop

    def _run(self, collection: Collection) -> StopReason:
        """Take the steps."""
        train, leaving = self.config.train, False
        batches, early, saver = self.batches, self.early, self.saver
        for step in self.steps:
            stop = self.agreement.exchange(step, self.reason_to_stop())
            if stop:
                if stop is not StopReason.SLOW_NODE:
                    self._finish(step)
                    return stop
                leaving = True
            self.position.step = step
            self.profile.before(step)
            # Only after the stop decision: reading a sample may draw from the generators that are saved.
            micro_batches = next(batches)
            result = self.take(step, micro_batches)
            done = step + 1
            collection.after(done)
            self.metrics.step(done, result)
            self.nonfinite.check(result)
            best = self._validate(done, collection)
            saver.poll()
            if early.due or done == train.steps:
                # The last save follows.
                break
            in_memory = saver.due_in_memory(done)
            if saver.due(done) or (best and self.config.checkpoint.keep_best):
                if leaving:
                    self._finish(done)
                    # A slow node is no reason to stop without the checkpoint.
                    if saver.failed is None:
                        return StopReason.SLOW_NODE
                else:
                    with self._saving():
                        saver.start(done)
            elif in_memory:
                with self._saving():
                    saver.start_in_memory(done)
        done = early.end(train.steps)
        self.metrics.log_pending(done)
        self._finish(done)
        return StopReason.NONE

    def _finish(self, done: int) -> None:
        """Save the state after ``done`` steps, the last ones here, and wait for the commit."""
        self.profile.stop(done)
        self.nonfinite.finish()
        with self._saving():
            self.saver.finish(done)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Flush the metrics before a save, so that all lines up to its step are written."""
        with self.position.at("saving"), self.metrics.paused():
            self.metrics.flush()
            yield

    def _validate(self, done: int, collection: Collection) -> bool:
        """Validate if it is time; return True if the loss is the lowest so far."""
        train = self.config.train
        if done != train.steps and (not train.validate_every or done % train.validate_every):
            return False
        with self.position.at(VALIDATING), self.metrics.paused(), collection.automatic():
            loss = self.validate()
            if loss is not None:
                self.metrics.write({"step": done, "validation_loss": loss})
        return self.early.record(done, loss)


@explain_refusals()
def train(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    flag: StopFlag,
    position: Position,
    on_exit: Callable[[], None],
) -> int:
    """Train until the end or an agreed stop; return the exit code (see exit_codes.py).

    Args:
        run: the run directory.
        attempt: the attempt.
        config: the config of the run.
        distributed: the place of this rank.
        flag: the stop signals.
        position: receives the step and the work of this rank.
        on_exit: called before the watchdog ends this process.

    Raises:
        UserError: the task, its data or the description of the ranks is wrong.
        Exception: any error of the task or of a peer's end.
    """
    choose_kernels(config.train.deterministic)
    hang_diagnosis.turn_on()
    distributed = process_group.join_run(
        distributed, run, attempt, timeout=config.train.timeout, interface=config.job.interface
    )
    if distributed.backend == "nccl" and distributed.rank == 0:
        announce_order(config.train.deterministic)
    ranks = process_group.control_ranks(distributed)
    with watching(run, attempt, config, distributed, position, on_exit) as at:
        context = Context(run, attempt, config, distributed, ranks, at)
        if distributed.backend == "nccl":
            with at(CONNECTING):
                process_group.connect(process_group.select_device(distributed))
        code = _train(context, flag, position)
        # Leave together: srun ends all tasks as soon as one exits with a code other than 0.
        with at("leaving"):
            if ranks.world_size > 1:
                dist.barrier(group=ranks.group)
        process_group.cleanup_distributed()
    return code


def _train(context: Context, flag: StopFlag, position: Position) -> int:
    """Build the parts of the training, run the loop, and report the end."""
    run, attempt, config = context.run, context.attempt, context.config
    ranks, at = context.ranks, context.at
    opened = open_task(context)
    # Make the engine while all ranks are at the same point: its group has a shorter timeout than the
    # watchdog.
    engine = build_engine(run, attempt, config, context.distributed, ranks)
    device = process_group.select_device(context.distributed)
    measured = measure(config, opened.task, opened.model, device)
    resumed = build_model(context, opened, engine, device)
    config, trainer, start = resumed.config, resumed.trainer, resumed.start
    context = replace(context, config=config)
    measured.watch.exclude_waits(trainer.model, compiled=config.train.compile)
    slow = SlowNodeWatch(
        run, attempt, ranks.gather(node_name()), replace=config.restarts.replace_slow
    )
    position.start = start
    early = EarlyStopping(config.train.patience)
    early.load_state_dict(resumed.extra("early_stopping", early.state_dict()))
    steps = range(start, early.end(config.train.steps))
    batches = build_batches(context, opened, resumed, steps)
    take = context.together(
        lambda: MicroBatchStep(trainer, opened.task, batches.batching, measured.loss)
    )
    # Only here, since the data may refuse to resume.
    announce(context, resumed, batches.batching)
    main = trainer.is_main_process
    sinks = context.together(lambda: build_sinks(run, config, start) if main else None)
    agreement = StopAgreement(ranks.group, config.train.stop_check_every)
    metrics = MetricsLog(
        config,
        opened.task,
        trainer,
        measured,
        sinks,
        ranks=ranks,
        attempt=number_columns(attempt),
        slow=slow,
        agreement=agreement,
    )
    metrics.restore(resumed.extra("metrics", []))
    recording = {
        "config": recorded(config),
        "environment": resumed.environment,
        "ways": parallelism(config),
    }
    saver: Saver = saver_of(
        trainer,
        engine,
        content=content_of(batches, early, metrics, recording),
        interval=build_interval(run, config, ranks, lambda: saver.costs),
        memory=EverySteps(config.checkpoint.memory_every or 0),
        report=SaveReports(run, attempt) if main else lambda _, __: None,
        saved=resumed.saved,
    )
    held_out = build_validation(context, opened, trainer)
    loop = Loop(
        config=config,
        steps=steps,
        batches=measured.watch.batches(batches),
        take=take,
        agreement=agreement,
        reason_to_stop=stop_reason(config, flag, slow, main=main),
        validate=lambda: (
            None if held_out is None else validate(trainer, opened.task, held_out, ranks=ranks)
        ),
        early=early,
        metrics=metrics,
        saver=saver,
        nonfinite=NonFiniteWatch(
            run,
            attempt,
            config,
            trainer,
            start=start,
            ranks=ranks,
            samples=samples_of(opened.dataset, batches.batching, config.seed),
        ),
        profile=Profile(
            run,
            config.train.profile,
            start,
            rank=context.distributed.rank,
            device=trainer.device,
            watch=measured.watch,
            position=position,
        ),
        position=position,
    )
    if context.distributed.local_rank == 0:
        # Only now: the server would import torch while the ranks do.
        offer_own_state(os.environ.get("OMP_NUM_THREADS"))
    with (
        context.explain_memory(trainer.parallel),
        at(TRAINING),
        showing_compilation(position, wanted=config.train.compile),
    ):
        measured.watch.start()
        try:
            stop = loop.run()
        finally:
            metrics.flush()
    with at("ending"):
        loop.agreement.finish()
        loop.batches.close()
    with at(VALIDATING):
        validated = early.seen == early.end(config.train.steps)
        loss = early.loss if stop or validated else loop.validate()
        if held_out is not None:
            held_out.close()
    if stop:
        code = stopped(run, attempt, stop, saver, trainer, slow.leaving)
    else:
        with at("making the report"):
            code = finished(context, opened.task, trainer, saver, engine, early, loss)
    # Before any rank leaves: srun ends rank 0 soon after another rank has left with an exit code, and an
    # upload takes longer.
    with at("sending the metrics"):
        metrics.close()
    return code


def build_validation(
    context: Context, opened: OpenedTask, trainer: DistributedAMPTrainer
) -> ValidationData | None:
    """Choose the validation samples of this rank, if the task has some; reads nothing yet."""
    config, distributed = context.config, context.distributed
    if opened.validation_set is None:
        return None
    return ValidationData(
        opened.validation_set,
        context.ranks,
        batch_size=config.train.batch_size,
        accumulation=accumulation_of(config, distributed.world_size),
        limit=config.train.validate_batches,
        same_count=trainer.forward_is_collective,
        workers=worker_processes(config, os.environ, opened.task.loader_processes),
        prefetch=config.data.prefetch,
        pin_memory=accelerator.is_accelerator(trainer.device),
        collate=opened.collate,
    )


def announce(context: Context, resumed: Resumed, batching: Batching) -> None:
    """Print how the training starts, and write the event ``started``, on rank 0."""
    trainer, restored, start = resumed.trainer, resumed.checkpoint, resumed.start
    if not trainer.is_main_process:
        return
    lines = list(restored.notes) if restored else []
    if restored is not None and restored.own is None:
        lines.append(
            "the random states are derived from seed, rank and step; the order of samples is unchanged"
        )
    if resumed.parallelism:
        lines.append(
            f"different from when step {start} was saved: {'; '.join(resumed.parallelism)}; the samples and "
            "the sums over them stay the same, but not their last bits, nor random draws such as dropout's"
        )
    reported = any(line.startswith("CPU threads") for line in lines)
    drift = [line for line in resumed.drift if not (reported and line.startswith("threads:"))]
    if drift:
        lines.append(
            f"the environment has changed since step {start} was saved: {'; '.join(drift)}; the last bits "
            "may differ from those of a training without the interruption"
        )
    if restored is None and (hint := faster(context.config.amp, trainer.device)) is not None:
        lines.append(hint)
    ranks = trainer.distributed.world_size
    where = f"resumed from step {start}" if restored else "starting at step 0"
    lines.append(f"{context.run.name}: {where}, {ranks} {'rank' if ranks == 1 else 'ranks'}")
    nodes = trainer.distributed.num_nodes
    lines += learning_rate_lines(context.config, trainer.optimizer)
    if (line := count_line(context.config, nodes, ranks)) is not None:
        lines.append(line)
    for line in lines:
        print(f"hpcrun: {line}", flush=True)
    started = Started(
        attempt=context.attempt,
        step=start,
        ranks=ranks,
        nodes=nodes,
        accumulation=batching.accumulation,
        parallel=trainer.parallel,
        **(memory_facts(restored) if restored else {}),
    )
    Journal(context.run).note(started)
    for line in batching.lines(context.config.train.steps):
        print(f"hpcrun: {line}", flush=True)


def memory_facts(restored: Restored) -> dict[str, Any]:
    """Return what the event ``started`` says about a state from memory, which is no commit."""
    if restored.snapshot is None:
        return {}
    return {"on_disk": restored.committed, "snapshot": restored.snapshot}


def stop_reason(
    config: Config, flag: StopFlag, slow: SlowNodeWatch, *, main: bool
) -> Callable[[], StopReason]:
    """Return a function for the reason to stop: a signal, or on rank 0 (``main``) ``slow`` or the time."""
    deadline = None
    if main:
        lead = float(config.job.signal_lead)
        given = given_end(os.environ)
        deadline = DeadlineWatch(lambda: asked_end(os.environ), lead, given=given).start()

    def reason() -> StopReason:
        # A signal outranks the time, and the time outranks a slow node.
        if flag.reason:
            return flag.reason
        late = deadline is not None and deadline.due()
        return StopReason.DEADLINE if late else slow.reason

    return reason
