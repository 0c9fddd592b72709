"""Lightning with one callback: the same bits after interruptions, fallback, refusals."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun.errors import UserError
from tests.checkpoint.test_quarantine import flip
from tests.support.on_ranks import agreed, ranks

pytestmark = pytest.mark.preload("tests.integrations.lightning_programs")


@pytest.fixture
def programs() -> Any:
    """Return the module that imports Lightning."""
    from tests.integrations import lightning_programs

    return lightning_programs


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = one.pop("weights"), other.pop("weights")
    alike = first.keys() == second.keys()
    return alike and one == other and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pytest.param(kind, marks=ranks(2, 2, 2, 2))
            for kind in ("workers", "accumulation", "gan", "sharded")
        ),
        pytest.param("three ranks", marks=[pytest.mark.slow, ranks(3, 3, 3, 3)]),
    ],
)
def test_two_stops_in_an_epoch_leave_the_bits_as_undisturbed(
    programs: Any,
    kind: str,
    rank: int,
    phase: int,
    tmp_path: Path,
    again: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    undisturbed = tmp_path / f"undisturbed-{rank}.pt"
    if phase == 0:
        torch.save(programs.state(programs.train(tmp_path / "whole", kind)), undisturbed)
    elif phase < 3:
        with pytest.raises(SystemExit) as stopped:
            programs.train(tmp_path / "parts", kind, stop=1 if phase == 1 else 5)
        assert stopped.value.code == 75
    else:
        trainer = programs.train(tmp_path / "parts", kind)
        assert same(programs.state(trainer), torch.load(undisturbed))
        finished = programs.train(tmp_path / "parts", kind)
        assert same(programs.state(finished), torch.load(undisturbed))
        assert agreed(finished.fit_loop.total_batch_idx) == trainer.fit_loop.total_batch_idx


@ranks(1, 1)
def test_a_flipped_byte_falls_back_to_the_checkpoint_before(
    programs: Any, phase: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if phase == 0:
        torch.save(
            programs.state(programs.train(tmp_path / "whole", "plain")), tmp_path / "whole.pt"
        )
        with pytest.raises(SystemExit):
            programs.train(tmp_path / "parts", "plain", stop=7)
        return
    newest = max((tmp_path / "parts").glob("step-*"))
    flip(next(newest.glob("*.bin")))
    trainer = programs.train(tmp_path / "parts", "plain")
    said = capfd.readouterr().err
    assert "resumed after step 6" in said
    assert newest.name in said
    assert same(programs.state(trainer), torch.load(tmp_path / "whole.pt"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "set it to 0"),
        ({"val_check_interval": "00:00:01:00"}, "give a number of batches"),
        ({"finds_rate": True}, "with another Trainer"),
        ({"data": [torch.zeros(1)]}, "DataLoader"),
    ],
)
@ranks(1)
def test_what_cannot_be_exact_is_refused_before_training(
    programs: Any, settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        programs.fit(tmp_path / "saved", **settings)
    assert not (tmp_path / "saved").exists()


@ranks(1)
def test_a_second_trainer_and_too_few_ranks_are_refused(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.fit(tmp_path / "saved")
    with pytest.raises(UserError, match="has ended there"):
        programs.fit(tmp_path / "saved")
    monkeypatch.setattr(programs.SLURMEnvironment, "detect", programs.SLURMEnvironment.detect)
    monkeypatch.setenv("HPCRUN_RUN", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"devices=2, num_nodes=2"):
        programs.fit(tmp_path / "saved")
    assert not programs.SLURMEnvironment.detect()


@ranks(1)
def test_lightning_requeues_its_own_job_after_the_save_of_hpcrun(
    programs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\nls {tmp_path}/saved > {tmp_path}/asked\necho "$@" >> {tmp_path}/asked'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")

    class Warn(programs.Callback):
        def on_train_start(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)  # Lightning's signal for a requeue

    place = {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}
    for name, value in place.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(SystemExit) as stopped:
        programs.fit(
            tmp_path / "saved",
            callbacks=[Warn()],
            plugins=[programs.SLURMEnvironment()],
            default_root_dir=tmp_path,
        )
    assert stopped.value.code == 75
    assert not [*tmp_path.rglob("hpc_ckpt*")]
    assert (tmp_path / "asked").read_text().split() == ["step-000000000", "requeue", "7"]
