"""tools/bench/build_memory.py measures what a start and a resume do."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.model.deferred import Deferred
from hpcrun.train.step.trainer import DistributedAMPTrainer

BENCH = Path(__file__).parents[2] / "tools" / "bench"
if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))

import build_memory  # noqa: E402


def test_only_a_start_draws_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Deferred] = []
    monkeypatch.setattr(Deferred, "require_no_alias", lambda built: drawn.append(built))
    monkeypatch.setattr(DistributedAMPTrainer, "control_ranks", lambda _: Ranks())
    place = DistributedConfig(world_size=2, num_gpus_per_node=2)
    shape = LanguageModelShape(width=16, layers=1, heads=1, context=8)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    try:
        build_memory.build(place, shape, "deferred")
        assert len(drawn) == 1
        build_memory.build(place, shape, "restored", resumes=True)
        assert len(drawn) == 1
    finally:
        dist.destroy_process_group()
