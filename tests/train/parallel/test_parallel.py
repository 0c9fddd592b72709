"""The choice of parallelism, the FSDP units, and the whole copy of a model for a report."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.config.training import FSDP
from hpcrun.devices import accelerator
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.train.model.checks import unreached
from hpcrun.train.parallel import fsdp, network
from hpcrun.train.parallel.choose import (
    Need,
    decide,
    decide_reshard,
    decide_shard,
    need,
    resolve_fsdp,
    resolve_parallel,
)
from hpcrun.train.parallel.fsdp import (
    connect_groups,
    layout,
    mesh_over,
    units,
    with_weights,
    without_weights,
)
from tests.support.on_ranks import agreed, ranks
from tests.support.training.parallelism import Net
from tests.support.training.small_training import config

SMALL, LARGE = Need(100, 100, 200), Need(1000, 1000, 2000)


def test_auto_takes_ddp_if_the_model_fits_and_fsdp_otherwise():
    chosen, line = decide(config(), SMALL, 1000)
    assert chosen == "ddp"
    assert line.startswith(
        "train.parallel=auto chooses ddp: 100 B of weights + 100 B of gradients + "
    )
    chosen, line = decide(config(), LARGE, 1000)
    assert chosen == "fsdp"
    assert line.endswith("= 4.0 kB per rank, of 1.0 kB; 40% are reserved for activations")


def test_a_sharded_run_stays_sharded():
    chosen, line = decide(config(), SMALL, 1000, earlier="fsdp")
    assert chosen == "fsdp"
    assert line.startswith("train.parallel=auto chooses fsdp, as in the last attempt: ")
    assert decide(config(), LARGE, 1000, earlier="ddp")[0] == "fsdp"
    assert decide(config(), SMALL, 1000, earlier="ddp")[0] == "ddp"


def test_auto_takes_ddp_for_options_of_ddp_and_reports_it():
    chosen, line = decide(config("train.find_unused_parameters=true"), LARGE, 1000)
    assert chosen == "ddp"
    assert line.startswith("train.parallel=auto chooses ddp, which train.find_unused_parameters ")


def test_memory_besides_the_weights_is_counted_and_named():
    net = nn.Linear(5, 5, bias=False)
    assert need(config(), net) == Need(100, 100, 200)
    assert need(config("optim.name=sgd"), net) == Need(100, 100, 100)
    more = config("train.ema=0.99", "train.gradient_as_bucket_view=false")
    assert need(more, net) == Need(100, 200, 200, average=100)
    assert (
        "200 B of optimizer state + 100 B of averaged weights = 600 B per rank, of 1.0 kB"
        in decide(more, need(more, net), 1000)[1]
    )


def test_a_single_rank_is_never_sharded(capsys):
    alone = DistributedConfig()
    assert resolve_parallel(config(), Net(), alone, Ranks()) == "single"
    assert resolve_parallel(config("train.parallel=dp"), Net(), alone, Ranks()) == "dp"
    assert capsys.readouterr().out == ""


class Deep(nn.Module):
    """A model with 16 blocks and 1.07 billion parameters, without memory."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList(nn.Linear(8192, 8192, bias=False) for _ in range(16))


# With many nodes the latency of rings through all ranks outweighs the bytes between the nodes.
@pytest.mark.parametrize(
    ("nodes", "gpu", "deterministic", "chosen"),
    [
        (8, "h100", True, "full"),
        (64, "h100", True, "hybrid"),
        (16, "h100", False, "full"),
        (64, "h100", False, "hybrid"),
        (8, "a100-80", True, "full"),
        (32, "a100-80", True, "hybrid"),
    ],
)
def test_auto_shards_as_the_cost_model_predicts(nodes, gpu, deterministic, chosen):
    asked = config("amp.dtype=bf16", f"train.deterministic={deterministic}")
    group, model = network.Group(8 * nodes, 8, gpu), Deep()
    assert decide_shard(asked, model, group, 80 * 10**9)[0] == chosen


def test_gathered_weights_stay_up_to_a_tenth_of_the_memory():
    asked, size = config("amp.dtype=bf16"), 2 * 2**30
    assert decide_reshard(asked, Deep(), 10 * size)[0] is False
    assert decide_reshard(asked, Deep(), 10 * size - 10) == (
        True,
        "fsdp.reshard_after_forward=auto chooses true: all weights in bf16 take 2.1 GB, and 10% of the "
        "device's memory are 2.1 GB",
    )
    in_full = config("amp.dtype=bf16", "fsdp.param_dtype=fp32")
    assert decide_reshard(in_full, Deep(), 10 * size)[0] is True
    for key, reshards in (("reshard_after_forward=false", False), ("cpu_offload=true", True)):
        asked = config("train.parallel=fsdp", f"fsdp.{key}")
        assert decide_reshard(asked, Deep(), 100 * size) == (reshards, "")


@ranks(4)
def test_a_run_keeps_the_shards_that_its_checkpoint_records(rank, capsys):
    everyone = Ranks(rank, 4, dist.new_group(backend="gloo"))

    def chosen(*overrides, nodes=2, parallel="fsdp", earlier=None, per_node=2):
        place = DistributedConfig(
            world_size=4, rank=rank, num_nodes=nodes, num_gpus_per_node=per_node
        )
        seen = resolve_fsdp(
            config(*overrides), Net(), place, everyone, parallel, earlier if rank == 0 else None
        )
        assert seen.fsdp.wrap == config(*overrides).fsdp.wrap
        return agreed(seen.fsdp.shard)

    assert chosen() == "full"  # NCCL's model is for GPUs.
    assert chosen("fsdp.wrap=blocks", earlier="full") == "full"
    assert chosen(earlier="auto") == "full"
    hybrid = ("train.parallel=fsdp", "fsdp.shard=hybrid", "job.nodes=2")
    assert chosen(*hybrid, earlier="full") == "hybrid"
    assert chosen(parallel="ddp") == "auto"
    capsys.readouterr()
    assert chosen(earlier="hybrid") == "hybrid"
    line = "hpcrun: fsdp.shard=auto chooses hybrid, as in the last checkpoint\n"
    assert capsys.readouterr().out == (line if rank == 0 else "")
    # On one node, and with unequal nodes, there is no choice.
    assert chosen(earlier="hybrid", nodes=1, per_node=4) == "full"
    assert chosen(earlier="hybrid", per_node=[1, 3, 3, 3][rank]) == "full"
    assert capsys.readouterr().out == ""


@ranks(4)
def test_shards_are_chosen_for_the_gpus_of_the_run(rank, capsys, monkeypatch):
    everyone = Ranks(rank, 4, dist.new_group(backend="gloo"))
    place = DistributedConfig(
        world_size=4, rank=rank, num_nodes=2, num_gpus_per_node=2, device_ids=(rank % 2,)
    )
    monkeypatch.setattr(accelerator, "device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(accelerator, "name", lambda _: "NVIDIA A100-SXM4-80GB")
    # The rank with the smallest GPU decides.
    for memory, shard in ((80_000, "hybrid"), (8_000, "full")):
        room = memory if rank == 3 else 80_000
        monkeypatch.setattr(accelerator, "memory", lambda _, room=room: (room, room))
        chosen = resolve_fsdp(config(), Net(), place, everyone, "fsdp")
        assert agreed(chosen.fsdp.shard) == shard
        # Net has 6.6 kB of weights.
        assert agreed(chosen.fsdp.reshard_after_forward) == (memory == 8_000)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (4 if rank == 0 else 0)
    starts = (
        *("reshard_after_forward=auto chooses false: all", "shard=auto chooses hybrid: NCCL's"),
        *("reshard_after_forward=auto chooses true: all", "shard=auto chooses full: hybrid keeps"),
    )
    for line, start in zip(lines, starts, strict=False):
        assert line.startswith(f"hpcrun: fsdp.{start} ")


def test_the_name_of_a_gpu_leads_to_its_machine():
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "AMD Instinct MI300X"]
    assert [network.machine_named(name) for name in [*names, "Tesla T4"]] == [
        *("h100", "a100-40", "b200", "mi300x", "h100")
    ]


def test_fsdp_units_follow_the_config():
    net = Net()
    assert units(net, FSDP())[0] == list(net.blocks)
    assert units(nn.Linear(2, 2), FSDP()) == ([], [])


@pytest.mark.parametrize("tied", [True, False])
def test_large_layers_outside_of_blocks_are_units_too(tied: bool, monkeypatch):
    monkeypatch.setattr(fsdp, "LARGE", 1024 * 16)
    shape = LanguageModelShape(layers=2, heads=2, width=16, vocabulary=1024, tied=tied)
    model = Llama(shape)
    blocks = list(model.model.layers)
    # Tied weights stay in the root, which both parts share.
    large = [] if tied else [model.model.embed_tokens, model.lm_head]
    assert units(model, FSDP()) == ([*blocks, *large], blocks)
    assert units(model, FSDP(wrap="blocks")) == (blocks, blocks)
    # Without an output layer the model may use the embedding's matrix; attention uses its own last layer.
    model.lm_head = nn.MultiheadAttention(1024, 1)
    assert units(model, FSDP()) == (blocks, blocks)


def test_buckets_of_ddp_grow_as_the_cost_model_says():
    counts = (1, 2, 8, 12, 64, 8192)
    found = [network.default_bucket(2**30, count) for count in counts]
    assert found == [None, 74.0, 103.0, 171.0, 256.0, 256.0]
    # Four buckets of torch's size or fewer.
    assert network.default_bucket(100 * 2**20, 8192) is None


def test_hybrid_sharding_groups_the_ranks_of_a_node():
    assert layout([(0, 0), (0, 1), (1, 0), (1, 1)]) == [[0, 1], [2, 3]]
    assert layout([(0, 0), (1, 0), (0, 1), (1, 1)]) == [[0, 2], [1, 3]]
    assert layout([(0, 0), (0, 1)]) == [[0, 1]]


def test_the_groups_of_a_hybrid_mesh_connect_first(monkeypatch):
    connected = []
    monkeypatch.setattr(dist, "all_reduce", lambda _, group: connected.append(group))
    monkeypatch.setattr(accelerator, "synchronize", lambda _: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = mesh_over(torch.tensor([[0, 1], [2, 3]]), ("copies", "shard"), "cpu", "fake")
        connect_groups(mesh, torch.device("cpu"))
        assert [dist.get_process_group_ranks(group) for group in connected] == [[0, 2], [0, 1]]
    finally:
        dist.destroy_process_group()


def test_hybrid_sharding_over_unequal_nodes_is_refused():
    with pytest.raises(UserError, match=r"the nodes have 2, 1; set fsdp.shard=full"):
        layout([(0, 0), (0, 1), (1, 0)])


def test_without_visible_paths_no_parameter_is_called_unused():
    hidden = nn.Linear(2, 2)
    entered = torch.ones(1, 2, requires_grad=True)
    value = checkpoint(hidden, entered, use_reentrant=True).sum()
    assert unreached(value, hidden.named_parameters()) == []
    value.backward()
    assert hidden.weight.grad is not None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.leave.weight = self.enter.weight
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.scale = 2.5


def test_a_hollow_copy_takes_no_memory():
    model = Tied()
    shape = without_weights(model)
    assert all(parameter.is_meta for parameter in shape.parameters())
    values = {
        "enter.weight": torch.ones(5, 3),
        "leave.weight": torch.ones(5, 3),
        "seen": torch.ones(2),
    }
    plain = with_weights(shape, values)
    assert plain.leave.weight is plain.enter.weight
    assert torch.equal(plain.enter.weight, torch.ones(5, 3))
    assert torch.equal(plain.seen, torch.ones(2))
    assert torch.equal(plain.table, model.table)
    assert plain.scale == 2.5
    assert not torch.equal(model.enter.weight, plain.enter.weight)


CONTRADICTIONS = [
    (["train.parallel=dp", "job.gpus=2"], "train.parallel: dp is for one process, but 1 x 2"),
    (["train.parallel=dp", "train.compile=true"], "train.compile: dp copies the model"),
    (["train.parallel=single", "job.gpus=2"], "train.parallel: single is for one rank, but 1 x 2"),
    (
        ["train.parallel=fsdp", "train.find_unused_parameters=true"],
        "fsdp needs the same parameters on all",
    ),
    (
        ["train.parallel=fsdp", "train.compile=true", "train.compile_mode=reduce-overhead"],
        "train.compile_mode: reduce-overhead replays",
    ),
    (["train.parallel=fsdp", "fsdp.shard=hybrid"], "fsdp.shard: hybrid keeps a copy on each"),
    (
        ["train.parallel=fsdp", "fsdp.cpu_offload=true", "amp.dtype=fp16"],
        "amp.dtype: torch's loss scaler reads a factor for offloaded gradients",
    ),
    (["fsdp.param_dtype=fp16", "amp.dtype=bf16"], "fsdp.param_dtype: gradients in fp16 need"),
    (["fsdp.reduce_dtype=fp16"], "fsdp.reduce_dtype: gradients in fp16 need"),
]


@pytest.mark.parametrize(("keys", "line"), CONTRADICTIONS)
def test_contradicting_keys_are_refused_before_a_submission(keys, line):
    with pytest.raises(UserError) as refused:
        config(*keys)
    assert line in str(refused.value)


def test_compatible_keys_are_accepted():
    config("train.parallel=fsdp", "fsdp.shard=hybrid", "job.nodes=2")
    config("train.parallel=fsdp", "amp.dtype=fp16", "fsdp.reduce_dtype=fp16", "train.compile=true")
    config("train.parallel=fsdp", "fsdp.cpu_offload=true", "amp.dtype=fp16", "job.cpu=true")
