"""Checks of the config against the started ranks."""

import pytest

from hpcrun.config import ConfigError
from hpcrun.errors import PrintedByRankZero, UserError
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.entry import require_fit
from tests.train.small_training import config


def ranks(world_size, rank=0):
    return DistributedConfig(world_size=world_size, rank=rank)


def test_single_means_one_rank():
    wanted = config("train.parallel=single")
    require_fit(wanted, ranks(1))
    with pytest.raises(UserError, match=r"^train.parallel: single, but 4 ranks were started"):
        require_fit(wanted, ranks(4))


def test_ddp_and_auto_take_any_number_of_ranks():
    for parallel in ("ddp", "auto"):
        for world_size in (1, 4):
            require_fit(config(f"train.parallel={parallel}"), ranks(world_size))


def test_a_batch_with_an_empty_micro_batch_is_refused():
    wanted = config("train.batch_size=32", "train.accumulation=2")
    for fitting in (3, 16):
        require_fit(wanted, ranks(fitting))
    with pytest.raises(UserError, match=r"32 samples are too few for the 17 ranks that were"):
        require_fit(wanted, ranks(17))
    require_fit(config("train.batch_size=32", "train.micro_batch=4"), ranks(17))


def test_only_rank_0_reports_an_error_of_all_ranks():
    with pytest.raises(UserError) as told:
        require_fit(config(), ranks(33, rank=0))
    assert not isinstance(told.value, PrintedByRankZero)
    with pytest.raises(PrintedByRankZero):
        require_fit(config(), ranks(33, rank=2))


def test_single_with_several_ranks_is_refused_before_anything_is_submitted():
    with pytest.raises(ConfigError, match=r"train.parallel: single is for one rank, but 2 x 1"):
        config("train.parallel=single", "job.nodes=2")


def test_a_command_may_divide_its_work_in_any_way():
    config("command=[python, train.py]", "job.gpus=3", "train.parallel=single")
