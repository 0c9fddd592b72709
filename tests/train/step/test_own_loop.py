"""The script of docs/own-loop.md runs, and survives disturbances as the page says."""

import builtins
import os
import re
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from hpcrun import FSDP, DistributedAMPTrainer, setup_distributed
from hpcrun.errors import UserError
from tests.support.on_ranks import agreed, forked, ranks
from tests.support.pages import code_blocks
from tests.support.ports import free_port
from tests.support.training import gan
from tests.support.training.forks import fork_ranks

PAGE = Path(__file__).parents[3] / "docs" / "own-loop.md"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


# Each part resumes from the previous part: the output line after which rank 0 gets the signal.
DISTURBANCES = [("step 100:", signal.SIGKILL), ("step 150:", signal.SIGTERM), None]


@pytest.fixture
def script(tmp_path):
    """Return the page's script with a trainer as a file."""
    text = code_blocks(PAGE.read_text(), "python")[1]
    path = tmp_path / "add.py"
    path.write_text(text)
    return path


@forked
def test_the_plain_loop_of_the_page_resumes(tmp_path):
    code = code_blocks(PAGE.read_text(), "python")[0]
    hurried = code.replace("loader=loader)", "loader=loader, every=7)")
    killed = hurried.replace(
        "state.step()", "state.step()\n        state.steps == 40 and os.abort()"
    )
    ends = []
    for number, text in enumerate([f"import os\n{killed}", hurried, hurried]):
        (logs := tmp_path / f"logs-{number}").mkdir()
        (tmp_path / "loop.py").write_text(text)

        def play(_):
            os.chdir(tmp_path)
            runpy.run_path("loop.py", run_name="__main__")

        ends.append((fork_ranks(1, play, logs), (logs / "rank-0.log").read_text()))
    (aborted, _), (resumed, first), (again, second) = ends
    assert (aborted, resumed, again) == ([-signal.SIGABRT], [0], [0])
    # A save takes a moment, so the newest may be lost.
    assert re.search("resumed after step (14|21|28|35) ", first)
    assert "resumed after step 320" in second
    assert first.splitlines()[-1] == second.splitlines()[-1]


def test_the_loop_with_a_data_loader_of_the_page_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(code_blocks(PAGE.read_text(), "python")[2], {"__name__": "page"})
    lines = capsys.readouterr().out.splitlines()
    last = re.fullmatch(r"epoch 19, step 160: loss (\S+), mean over the ranks (\S+)", lines[-1])
    assert float(last[1]) == float(last[2]) < 0.01
    assert torch.load("model.pth", weights_only=True)["step"] == 160


def disturbed(script, world_size):
    """Run the script in parts; return the exit codes and rank 0's first and last line of each.

    The ranks get torchrun's variables; torchrun itself would import torch again for each rank.
    """
    place, parts = script.with_name("disturbed"), []
    place.mkdir()
    for number, disturbance in enumerate(DISTURBANCES):
        logs, port = script.with_name(f"logs-{number}"), free_port()
        logs.mkdir()

        def play(rank, disturbance=disturbance, port=port):
            play_rank(script, place, rank, world_size, port, disturbance)

        codes = fork_ranks(world_size, play, logs)
        lines = (logs / "rank-0.log").read_text().splitlines()
        parts.append((codes, lines[0], lines[-1]))
    return parts


def play_rank(script, place, rank, world_size, port, disturbance):
    """Run the script in the folder ``place`` as a rank."""
    os.chdir(place)
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if disturbance is not None:
        line, number = disturbance
        original = builtins.print

        def disturbing(*values, **options):
            original(*values, **options)
            if values and str(values[0]).startswith(line):
                os.kill(os.getpid(), number)

        builtins.print = disturbing
    runpy.run_path(str(script), run_name="__main__")


def undisturbed(script, launcher, folder):
    """Return the first and the last line of the script, started as the page says."""
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return lines[0], lines[-1]


@forked
def test_one_rank_killed_and_stopped_ends_with_the_undisturbed_weights(script, tmp_path):
    first, weights = undisturbed(script, (), tmp_path)
    assert first == "one process, from step 0"
    assert re.fullmatch(r"weights [0-9a-f]{16}", weights)
    killed, stopped, ended = disturbed(script, 1)
    assert killed[0] == [-signal.SIGKILL]
    assert stopped[:2] == ([75], "one process, from step 100")
    assert stopped[2].startswith("step 150:")
    assert ended == ([0], "one process, from step 150", weights)


@forked
def test_torchrun_with_a_killed_rank_changes_no_bit(script, tmp_path):
    first, weights = undisturbed(script, TORCHRUN, tmp_path)
    assert first == "2 ranks, from step 0"
    killed, stopped, ended = disturbed(script, 2)
    assert killed[0][0] == -signal.SIGKILL
    assert killed[0][1] > 0
    assert stopped[:2] == ([75, 75], "2 ranks, from step 100")
    # Both ranks stopped one step later, after their agreement.
    assert ended == ([0, 0], "2 ranks, from step 151", weights)


def unwrapped(net, make, parallel="ddp", **options):
    trainer = DistributedAMPTrainer(net, make, parallel=parallel, device="cpu", **options)
    trainer.setup_distributed()
    return trainer


def wrapped(net, make, parallel="ddp", **options):
    trainer = unwrapped(net, make, parallel, **options)
    trainer.wrap_model()
    return trainer


SHARDED = [FSDP(), FSDP(reshard_after_forward=False)]


@pytest.mark.parametrize("fsdp", [None, *SHARDED])
@ranks(2)
def test_two_trainers_with_coupled_losses_train_as_plain_torch(rank, fsdp):
    made = partial(wrapped, parallel="fsdp" if fsdp else "ddp", fsdp=fsdp)
    torch.testing.assert_close(gan.by_trainers(made, rank, 2), gan.by_hand())


@ranks(2)
def test_passes_around_averaged_weights_use_the_right_weights(rank):
    def passes(parallel, fsdp=None):
        generator, _ = gan.nets()
        made = wrapped(generator, gan.sgd, parallel, ema=0.5, fsdp=fsdp)
        noise = torch.ones(2, 3)
        made.training_step(noise, lambda model, z: model(z).square().mean())
        results = [made.model(noise)]
        with made.averaged():
            results += [made.model(noise), made.model(noise)]
        return torch.stack([*results, made.model(noise)]).detach()

    copies = passes("ddp")
    assert len(copies.unique(dim=0)) == 2
    for fsdp in SHARDED:
        torch.testing.assert_close(passes("fsdp", fsdp), copies)


@pytest.mark.parametrize("fsdp", SHARDED)
@ranks(2)
def test_a_checkpoint_after_a_pass_has_the_shards(rank, tmp_path, fsdp):
    made = wrapped(gan.nets()[0], gan.sgd, "fsdp", fsdp=fsdp)
    noise = torch.ones(2, 3)

    def stepped():
        made.training_step(noise, lambda model, z: model(z).square().mean())
        return made.model(noise).detach()

    stepped()
    assert made.save_checkpoint(tmp_path, 1).ok
    after = stepped()
    made.load_checkpoint(tmp_path)
    assert torch.equal(stepped(), after)


@ranks(2)
def test_the_first_step_wraps_the_model(rank, tmp_path):
    def early(parallel):
        return unwrapped(gan.nets()[0], gan.sgd, parallel)

    for parallel in ("ddp", "fsdp"):
        made = early(parallel)
        made.training_step(
            torch.full((2, 3), rank + 1.0), lambda model, x: model(x).square().mean()
        )
        agreed(gan.weights(made.module).tolist())
    # FSDP replaces the parameters, and so the optimizer.
    for ask in (
        lambda trainer: trainer.optimizer,
        lambda trainer: trainer.load_checkpoint(tmp_path / "none"),
        lambda trainer: trainer.whole_module(),
    ):
        ask(early("ddp"))
        with pytest.raises(RuntimeError, match=r"setup_distributed\(\) and wrap_model\(\) before"):
            ask(early("fsdp"))


@ranks(2)
def test_ranks_of_the_program_s_group_train_one_model(rank, tmp_path):
    """Only ``init_process_group`` numbers these ranks, as in programs with mp.spawn."""
    torch.manual_seed(rank)
    made = unwrapped(torch.nn.Linear(2, 1), gan.sgd)
    place = made.distributed
    assert [place.rank, place.world_size, place.local_rank] == [rank, 2, rank]
    assert place.num_gpus_per_node == 2
    assert (place.launch_method, place.backend) == ("spawn", "gloo")
    assert made.is_main_process == (rank == 0)
    made.wrap_model()
    made.training_step(torch.full((1, 2), rank + 1.0), lambda model, batch: model(batch).sum())
    assert made.save_checkpoint(tmp_path, 1).ok
    agreed(torch.cat([w.flatten() for w in made.module.parameters()]).tolist())


@ranks(2)
def test_a_group_with_other_rank_numbers_is_refused(rank, monkeypatch):
    for name, value in {"RANK": 1 - rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
        monkeypatch.setenv(f"LOCAL_{name}", str(value))
    with pytest.raises(UserError, match="give init_process_group the launcher's rank and") as told:
        setup_distributed()
    line = f"the process group says rank {rank} of 2, and torchrun says rank {1 - rank} of 2"
    assert line in str(told.value)
