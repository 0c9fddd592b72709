"""004: quick reference. docs/seeds.md lists its statements."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hpcrun import DistributedConfig
from hpcrun.devices.devices import visible_gpus
from hpcrun.errors import ClusterError
from tests.diagnose.test_catalog import diagnosis
from tests.seeds.playing import output, start
from tests.seeds.test_000_trainer_tasks import make
from tests.support.on_ranks import gathered, ranks
from tests.support.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples/standalone.py"
SECTION = """\
parallel:
  world_size: {ranks}
  rank: null
  master_addr: "localhost"
  master_port: "{port}"
"""


def test_the_standalone_program_trains_and_stops_together(tmp_path):
    (tmp_path / "parallel.yaml").write_text(SECTION.format(ranks=2, port=free_port()))
    text = output(start(tmp_path, str(EXAMPLE)))
    ends = {line.split()[-2] for line in text.splitlines() if "ended after" in line}
    assert len(text.splitlines()) == 2
    assert len(ends) == 1
    assert 2 <= int(ends.pop()) <= 30
    saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
    assert saved["model_state_dict"].keys() == {"weight", "bias"}
    assert saved["step"] >= 2


def test_a_section_of_the_config_file_describes_the_ranks(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(SECTION.format(ranks=1, port=12355))
    found = DistributedConfig.from_file(path)
    assert (found.world_size, found.rank) == (1, 0)
    assert (found.master_addr, found.master_port) == ("localhost", 12355)
    assert found.validate() is True


def test_the_visible_gpus_are_counted_without_torch():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,4,5"}) == 3


def test_a_rank_takes_one_device_of_the_visible(monkeypatch):
    variables = {
        **{"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
        **{"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "3,4,5"},
    }
    found = DistributedConfig.from_env(variables)
    assert (found.backend, found.device_ids) == ("nccl", (2,))
    with pytest.raises(ClusterError, match=r"names 2 GPUs.*one"):
        found.model_copy(update={"device_ids": (0, 1)}).validate(visible_devices=3)
    with pytest.raises(ClusterError, match="3 ranks on this node but 1 visible"):
        found.validate(visible_devices=1)


MESSAGES = [
    ("ValueError: device_ids can only be None or contain a single element.", "device_ids"),
    ("RuntimeError: device_ids can only be None or contain a single device", "device_ids"),
    ("RuntimeError: Address already in use", "free port"),
]


@pytest.mark.parametrize(("line", "remedy"), MESSAGES)
def test_an_error_of_the_reference_has_a_remedy(line, remedy):
    found = diagnosis(line)
    assert found is not None
    assert remedy in found.remedy


def test_an_error_without_an_entry_shows_its_line():
    for line in ("AttributeError: 'Trainer' object has no attribute 'epoch'", "KeyError: 'valid'"):
        found = diagnosis(f"Traceback (most recent call last):\n{line}")
        assert found is not None
        assert line in found.evidence[-1].text


@ranks(2)
def test_the_batch_size_is_that_of_each_rank(rank, world_size):
    x = torch.randn(32, 4)
    dataset = TensorDataset(x, x.sum(1))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    trainer = make(rank, world_size)
    seen = []
    for batch in loader:
        trainer.training_step(batch)
        seen.append(len(batch[0]))
    assert seen == [4] * 4
    assert sum(gathered(sum(seen))) == 32


@ranks(2)
def test_ranks_wait_for_each_other_at_a_barrier(rank, world_size, tmp_path):
    trainer = make(rank, world_size)
    trainer.setup_distributed()
    assert isinstance(trainer.wrap_model(), DistributedDataParallel)
    if trainer.is_main_process:
        (tmp_path / "written").write_text("by rank 0")
    dist.barrier()
    assert (tmp_path / "written").read_text() == "by rank 0"
