"""The keys of a config that may change after a run has begun."""

import json
from pathlib import Path

import pytest

from hpcrun.config import (
    Config,
    all_differences,
    changed_ways,
    changes_since,
    lengths_left,
    override_layer,
    parallelism,
    recorded,
    resolve,
    training_differences,
)
from hpcrun.config.schema import known_keys

BEGUN = ["job.gpus=2", "train.batch_size=32"]


@pytest.mark.parametrize(
    "change",
    [
        *("seed=1", "train.batch_size=64", "train.clip_norm=0.5", "train.ema=0.9", "train.lr=0.1"),
        *("optim.warmup_steps=3", "optim.weight_decay=0.2", "optim.eps=1e-5"),
        *("optim.name=sgd", "amp.dtype=fp16 amp.init_scale=4"),
        *("data.path=there", "model.width=3", "task=digits-classifier"),
        *("checkpoint.keep_best=1", "train.patience=3 train.validate_every=2"),
        "train.steps=9",
    ],
)
def test_a_changed_key_is_refused_after_a_save(change):
    old, new = (resolve([override_layer([*BEGUN, *more])]) for more in ([], change.split()))
    found = changes_since(json.loads(json.dumps(recorded(old))), new, 20)
    named = [line.partition(":")[0] for line in found.refused]
    assert named == sorted(word.partition("=")[0] for word in change.split())
    assert (found.allowed, bool(found.hint)) == ([], change == "train.steps=9")
    assert found.refusal(Path("config.yaml"), 20).startswith("config.yaml: cannot continue from st")


def test_a_changed_key_that_a_resume_accepts_is_named():
    change = ["train.steps=99", "checkpoint.every=7", "train.log_every=3", "train.validate_every=4"]
    given = ["optim.schedule=constant", "job.time=10", "train.micro_batch=2"]
    old, new = (
        resolve([override_layer([*BEGUN, "optim.schedule=constant", *more])])
        for more in ([], [*change, *given])
    )
    found = changes_since(recorded(old), new, 20)
    assert found.refused == []
    assert [line.partition(":")[0] for line in found.allowed] == sorted(
        word.partition("=")[0] for word in change
    )
    # An earlier version recorded nothing, and a later one may know other keys.
    assert changes_since(None, new, 20) is changes_since({"bogus": 1}, new, 20) is None


def test_all_changes_of_a_submission_are_named_without_secrets():
    old, new = (
        resolve([override_layer(["job.cpu=true", "job.env.TOKEN=first", *more])])
        for more in ([], ["job.time=10", "job.env.TOKEN=second", "train.lr=0.1"])
    )
    assert all_differences(old, new) == [
        "job.env.TOKEN: *** -> ***",
        "job.time: None -> 00:10:00",
        "train.lr: 0.0003 -> 0.1",
    ]


@pytest.mark.parametrize(
    ("begun", "change", "done", "keys"),
    [
        ("train.steps=20 optim.schedule=constant", "train.steps=40", 19, []),
        ("train.steps=20 optim.schedule=constant", "train.steps=40", 20, ["train.steps"]),
        ("train.steps=20 optim.schedule=constant", "train.steps=9", 9, ["train.steps"]),
        ("train.steps=20 optim.schedule=wsd", "train.steps=40", 17, []),
        ("train.steps=20 optim.schedule=wsd", "train.steps=40", 18, ["train.steps"]),
        ("train.steps=40 optim.schedule=wsd", "train.steps=20", 18, ["train.steps"]),
        ("optim.schedule=constant", "optim.schedule=wsd optim.decay_steps=5", 9, []),
        ("optim.warmup_steps=9", "train.steps=40", 8, []),
        ("optim.warmup_steps=9", "train.steps=40", 9, ["train.steps"]),
        ("optim.schedule=wsd", "optim.warmup_steps=5", 7, ["optim.warmup_steps"]),
    ],
)
def test_the_length_may_change_until_the_learning_rate_decays(begun, change, done, keys):
    old, new = (resolve([override_layer([*begun.split(), *more])]) for more in ([], change.split()))
    assert [line.partition(":")[0] for line in training_differences(old, new, done)] == keys


def test_a_checkpoint_without_a_newer_key_counts_with_the_default():
    config = resolve(
        [override_layer(["train.parallel=fsdp", "train.deterministic=strict", "fsdp.shard=full"])]
    )
    before = {key: value for key, value in parallelism(config).items() if key.startswith("train.")}
    assert changed_ways(before, config, sharded=False) == []
    each = "fsdp.reduce_each_micro_batch"
    # It is compared with the meaning of `auto`; with one micro-batch the key has no effect.
    large = [f"{each}: False -> True"]
    same = before | {each: "auto", "fsdp.deferred_init": False}
    assert changed_ways(same, config, sharded=True, auto_reduces=True) == []
    set_now = resolve([override_layer(["train.parallel=fsdp", f"{each}=true", "fsdp.shard=full"])])
    assert changed_ways(same, set_now, sharded=True, auto_reduces=False) == large
    assert changed_ways(same, set_now, sharded=True, auto_reduces=True) == []
    assert changed_ways(same | {"train.compile": True}, config, sharded=False) == [
        "train.compile: True -> False"
    ]


def test_the_recorded_shards_count_instead_of_auto():
    config = resolve([override_layer(["train.parallel=fsdp", "fsdp.shard=hybrid", "job.nodes=2"])])
    before = parallelism(config)
    assert changed_ways(before, config, sharded=True) == []
    full = before | {"fsdp.shard": "full"}
    assert changed_ways(full, config, sharded=True) == ["fsdp.shard: full -> hybrid"]
    # A training without FSDP records auto.
    assert changed_ways(before | {"fsdp.shard": "auto"}, config, sharded=True) == []


# The rule for each key of the schema after a run has begun. These keys do not affect the weights:
FREE = {
    *("name", "job.*", "restarts.*", "watch.*"),
    *("checkpoint.every", "checkpoint.minutes", "checkpoint.auto", "checkpoint.keep"),
    *("checkpoint.keep_every", "checkpoint.host_memory"),
    *("checkpoint.memory_every", "checkpoint.memory_copies"),
    *(
        "train.timeout",
        "train.hang_after",
        "train.hang_start",
        "train.connect_timeout",
        "train.profile",
        "train.affinity",
    ),
    *("fsdp.deferred_init", "fsdp.reshard_after_forward"),
    *("train.log_every", "train.stop_check_every", "train.nonfinite_limit"),
}
# Free unless validation decides when training ends or which weights are best:
FREE_IF_NOTHING_IS_JUDGED = {"train.validate_every", "train.validate_batches"}
# Only the last bits depend on these:
ROUNDING = set(parallelism(Config()))
# Free as long as no finished step depended on them:
LENGTH = {"train.steps", "optim.schedule", "optim.decay_steps", "optim.final_lr_fraction"}
DECIDES = {
    *("task", "command", "seed", "model", "data"),
    *("train.batch_size", "train.lr", "train.lr_scaling", "train.lr_base_batch"),
    *("train.comm_hook", "train.powersgd_rank", "train.powersgd_start"),
    *("train.clip_norm", "train.patience", "train.ema"),
    *("train.init_from", "train.init_rename"),
    "train.broadcast_buffers",
    *("fsdp.param_dtype", "fsdp.reduce_dtype"),
    *("optim.name", "optim.betas", "optim.eps", "optim.weight_decay", "optim.momentum"),
    *("optim.warmup_steps", "checkpoint.keep_best"),
    *("amp.dtype", "amp.init_scale", "amp.growth_factor", "amp.backoff_factor"),
    *("amp.growth_interval", "amp.dynamic"),
}
SECTIONS = {"job", "restarts", "train", "fsdp", "optim", "amp", "checkpoint", "watch"}


def decided(key):
    section = key.partition(".")[0]
    return f"{section}.*" if f"{section}.*" in FREE else key


def changed(config, key):
    """Return ``config`` with another value of ``key``, valid or not."""
    section, _, leaf = key.rpartition(".")
    part = getattr(config, section) if section else config
    value = getattr(part, leaf)
    if key in ("model", "data"):
        other = value.model_validate(value.model_dump() | {"own": 1})
    elif isinstance(value, int | float):
        other = not value if isinstance(value, bool) else value + 1
    else:
        other = ["other"] if isinstance(value, list | tuple) else 7 if value is None else "other"
    part = part.model_copy(update={leaf: other})
    return config.model_copy(update={section: part}) if section else part


def test_every_key_of_the_schema_has_a_rule():
    keys = {decided(key) for key in known_keys(Config) if key not in SECTIONS}
    all_decided = [FREE, FREE_IF_NOTHING_IS_JUDGED, ROUNDING, LENGTH, DECIDES]
    assert keys == set().union(*all_decided)
    assert len(keys) == sum(map(len, all_decided))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("judged", ["", "train.patience=3 train.validate_every=5"])
def test_each_rule_holds(judged):
    old = resolve([override_layer(["optim.warmup_steps=9", *judged.split()])])
    free = FREE | ROUNDING | LENGTH | (set() if judged else FREE_IF_NOTHING_IS_JUDGED)
    for key in known_keys(Config):
        if key not in SECTIONS:
            new = changed(old, key)
            assert new != old, key
            assert bool(training_differences(old, new, 3)) == (decided(key) not in free), key


def test_the_number_of_best_weights_may_change_not_reach_zero():
    some, fewer, none = (
        resolve([override_layer([f"checkpoint.keep_best={n}"])]) for n in (3, 1, 0)
    )
    assert training_differences(some, fewer) == []
    assert training_differences(some, none) == ["checkpoint.keep_best: 3 -> 0"]


def test_the_possible_length_is_reported_with_its_reason():
    def left(old, new, done):
        old, new = (resolve([override_layer(line.split())]) for line in (old, new))
        return lengths_left(old, new, done)

    constant, wsd = "optim.schedule=constant", "train.steps=20 optim.schedule=wsd"
    assert left(wsd, f"{wsd} train.steps=40 train.lr=1", 17) is None
    told = "the length may change only before the learning rate decays, from step"
    assert left(wsd, f"{wsd} train.steps=40", 19) == f"{told} 18"
    assert left(wsd, f"{wsd} train.steps=14", 13) == f"{told} 13"
    assert left(constant, "optim.schedule=cosine", 5) == f"{told} 0"
    assert left(constant, f"{constant} train.steps=9", 9) == "train.steps must be more than 9"
    assert left(f"{constant} train.steps=9", constant, 9) == "the run cannot become longer"


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ("python train.py --lr 0.2 --epochs 30", "… --lr 0.1 … -> … --lr 0.2 …"),
        ("python train.py --lr 0.1 --epochs 30 --amp", "… -> … --amp"),
        ("python other.py --lr 0.1 --epochs 30", "… train.py … -> … other.py …"),
        ("python train.py --epochs 30", "… --lr 0.1 … -> …"),
        ("sh x.sh", "python train.py --lr 0.1 --epochs 30 -> sh x.sh"),
    ],
)
def test_another_command_shows_the_changed_words(after: str, words: str) -> None:
    before = Config(command=["python", "train.py", "--lr", "0.1", "--epochs", "30"])
    assert all_differences(before, Config(command=after.split())) == [f"command: {words}"]
