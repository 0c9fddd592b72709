"""BatchNorm becomes SyncBatchNorm on GPUs; weights and names stay."""

import pytest
import torch
from torch import nn

from hpcrun.train.model.prepare import synchronized, why_not_synchronized


def model():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    made = nn.Sequential(inner, nn.BatchNorm1d(4, affine=False, momentum=0.3))
    made(torch.randn(5, 3))
    inner[1].weight.requires_grad_(False)
    return made


def test_every_batchnorm_is_converted_and_keeps_its_weights_and_names():
    before = model()
    assert why_not_synchronized(before, ranks=2, on_gpu=True) is None
    after = synchronized(model(), ranks=2, on_gpu=True)
    kinds = [type(part) for part in after.modules()]
    assert kinds.count(nn.SyncBatchNorm) == 2
    assert nn.BatchNorm1d not in kinds
    assert nn.LayerNorm in kinds
    assert (after[1].momentum, after[0][1].weight.requires_grad) == (0.3, False)
    old, new = before.state_dict(), after.state_dict()
    assert list(old) == list(new)
    assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(
    ("make", "ranks", "on_gpu", "said"),
    [
        (model, 2, False, "train.sync_batchnorm: has no effect on the CPU"),
        (lambda: nn.Linear(2, 2), 2, True, "the model has no BatchNorm"),
        (model, 1, True, None),
        (lambda: "no module", 2, True, None),
    ],
)
def test_otherwise_the_model_stays_and_a_line_says_why(make, ranks, on_gpu, said):
    given = make()
    assert synchronized(given, ranks=ranks, on_gpu=on_gpu) is given
    line = why_not_synchronized(given, ranks=ranks, on_gpu=on_gpu)
    assert not isinstance(given, nn.Module) or nn.SyncBatchNorm not in map(type, given.modules())
    assert line is None if said is None else said in line
