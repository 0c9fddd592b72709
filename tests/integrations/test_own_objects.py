"""Environments, random generators and memories that are passed to ``hpcrun.resumable`` come back whole."""

import datetime
import enum
import io
import multiprocessing
import pathlib
import random
from collections import deque, namedtuple
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import hpcrun
from hpcrun.storage.errors import CheckpointError
from hpcrun.train.own_loop.own_objects import OwnObject, is_own, on_cpu, on_device
from tests.support.on_ranks import forked, ranks

Transition = namedtuple("Transition", "state reward")


class Phase(enum.Enum):
    DAY, NIGHT = 1, 2


@dataclass
class Player:
    name: str
    cards: list = field(default_factory=list)


class Game:
    """An environment that makes parts of its state at the first step only."""

    def __init__(self):
        self.rng, self.player, self.noise = None, None, random.Random(0)
        self.phase, self.date, self.fields = Phase.DAY, datetime.date(2020, 1, 1), range(3)
        self.memory, self.place = deque(maxlen=4), pathlib.Path("a")
        self.board = np.zeros((2, 2), dtype="U1")

    def step(self):
        self.rng = np.random.default_rng(1) if self.rng is None else self.rng
        self.player = Player("x") if self.player is None else self.player
        self.player.cards.append(int(self.rng.integers(100)))
        self.phase = Phase.NIGHT if self.phase is Phase.DAY else Phase.DAY
        self.date += datetime.timedelta(days=1)
        self.fields = range(self.fields.stop + 1)
        self.board[0, 0] = str(self.player.cards[-1])[0]
        self.memory.append(Transition(torch.rand(2), self.noise.random()))
        return self.seen()

    def seen(self):
        memory = [(*row.state.tolist(), row.reward) for row in self.memory]
        cards = (self.player.name, tuple(self.player.cards))
        return cards, self.phase, self.date, self.fields, self.board.tolist(), memory


def played(game, steps):
    torch.manual_seed(0)
    return [game.step() for _ in range(steps)][-1]


def carried(old, new):
    saved = OwnObject("env", old, []).state_dict()
    OwnObject("env", new, []).load_state_dict(saved)
    return new


def test_a_new_environment_continues_where_the_old_was():
    old = Game()
    seen = played(old, 3)
    new = carried(old, Game())
    assert new.seen() == seen
    assert new.memory.maxlen == 4
    assert type(new.memory[0]) is Transition
    torch.manual_seed(5)
    more = old.step(), old.step()
    torch.manual_seed(5)
    assert (new.step(), new.step()) == more


@pytest.mark.parametrize(
    "make", [np.random.default_rng, np.random.RandomState, random.Random, torch.Generator]
)
def test_a_generator_is_filled_in_place(make):
    old, new = make(), make()
    copied = carried({"inner": [old]}, {"inner": [new]})
    assert copied["inner"][0] is new
    draw = {torch.Generator: lambda one: torch.rand(1, generator=one).item()}.get(
        make, lambda one: one.random()
    )
    assert draw(old) == draw(new)
    assert is_own(old)
    assert is_own([{"a": old}])


class Remote:
    def __init__(self, held):
        self.held = held


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (lambda: multiprocessing.Pipe()[0], "is a Connection, so the state is in a file"),
        (lambda: multiprocessing.Process(), "another process or thread, .* use SyncVectorEnv"),
        (lambda: iter([1]), "list_iterator, which a checkpoint cannot hold"),
        (lambda: io.StringIO("a"), "is a StringIO, so the state is in a file"),
    ],
)
def test_a_state_outside_of_python_is_refused(held, words):
    with pytest.raises(CheckpointError, match=rf"env\.held.*{words}"):
        OwnObject("env", Remote(held()), []).state_dict()


def test_plain_values_and_modules_keep_their_own_way():
    plain = [1, "a", None, torch.ones(1), {"a": 1}, [2], torch.nn.Linear(1, 1), len, is_own, int]
    assert not any(map(is_own, plain))
    kept = on_device(on_cpu((np.float32([1, 2]), [np.int64(3)], {"x": torch.ones(1)})))
    assert [kept[0].tolist(), kept[0].dtype, kept[1], type(kept[1][0])] == [
        [1, 2], np.float32, [3], np.int64,
    ]  # fmt: skip


@forked
@pytest.mark.parametrize("vector", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_environments_of_gymnasium_are_saved_or_refused(tmp_path, vector):
    gym = pytest.importorskip("gymnasium")
    envs = getattr(gym.vector, vector)([lambda: gym.make("Pendulum-v1", max_episode_steps=3)] * 2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if vector == "AsyncVectorEnv":
        with pytest.raises(CheckpointError, match=r"envs\..* use SyncVectorEnv"):
            hpcrun.resumable(model=model, optimizer=optimizer, envs=envs, folder=tmp_path)
        envs.close()
        return
    envs.reset(seed=1)
    actions = np.ones((2, 1), dtype=np.float32)
    envs.step(actions)
    other = gym.vector.SyncVectorEnv(envs.env_fns)  # without a reset
    carried(envs, other)
    for _ in range(6):  # over the ends of episodes, which draw a new start
        np.testing.assert_array_equal(envs.step(actions)[0], other.step(actions)[0])


@ranks(2, 2)
def test_each_rank_has_its_own_objects(tmp_path, phase, rank):
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    rng, env = np.random.default_rng(rank + 10 * phase), Game()
    if not phase:
        played(env, rank + 1)
    state = hpcrun.resumable(model=model, rng=rng, env=env, folder=tmp_path)
    if phase:
        assert len(env.player.cards) == rank + 1
        assert rng.random() == np.random.default_rng(rank).random()
        assert state.kept == rank
    else:
        state.step(keep=rank)
        state.finish()
