"""A loop gets a line for state that it carries and that no checkpoint has, and usual loops get none."""

import argparse
import contextlib
import copy
import csv
import io
import itertools
import logging
import random
import re
import sys
import time
from collections import defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm import tqdm

import hpcrun
from tests.support.on_ranks import forked

DRAWS = np.random.RandomState(3)
Transition = namedtuple("Transition", "state reward")


def drawn():
    """Draw from a global of this module."""
    return DRAWS.rand()


def numbers():
    count = 0.0
    while True:
        count += 1
        yield count


class Simulation:
    """An environment without a generator of its own."""

    def __init__(self):
        self.x = torch.zeros(2)

    def step(self):
        self.x = 0.9 * self.x + torch.randn(2)
        return self.x


class Wrapped:
    def __init__(self, env):
        self.env = env


class Memory:
    def __init__(self):
        self.rows = []

    def push(self, row):
        self.rows.append(row)

    def sample(self, count):
        return random.choices(self.rows, k=count)


class Average:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def reset(self):
        self.__init__()

    def update(self, value):
        self.sum, self.count = self.sum + value, self.count + 1


class Noisy(Dataset):
    def __init__(self):
        self.draws = np.random.default_rng(1)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([self.draws.random(), index], dtype=torch.float32)


def parts():
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def steps(state, work, count=4):
    for _ in range(count):
        work()
        state.step()


# Each begins a training in the folder, and makes some steps with what it carries.
def a_generator(folder):
    rng = np.random.default_rng(0)
    steps(hpcrun.resumable(**parts(), folder=folder), rng.random)


def a_generator_of_torch_in_a_dict(folder):
    state = hpcrun.resumable(**parts(), folder=folder)
    draws = {"noise": torch.Generator()}
    steps(state, lambda: torch.rand(2, generator=draws["noise"]))


def a_generator_of_a_module(folder):
    steps(hpcrun.resumable(**parts(), folder=folder), drawn)


def a_generator_in_the_model(folder):
    given = parts()
    given["model"].draws = random.Random(1)
    steps(hpcrun.resumable(**given, folder=folder), given["model"].draws.random)


def an_environment(folder):
    wrapped = [Wrapped(Simulation())]
    steps(hpcrun.resumable(**parts(), folder=folder), lambda: wrapped[0].env.step())


def an_iterator(folder):
    batches = itertools.cycle([1, 2, 3])
    steps(hpcrun.resumable(**parts(), folder=folder), lambda: next(batches))


def a_nameless_iterator(folder):
    state = hpcrun.resumable(**parts(), folder=folder)
    for _, _ in zip(range(4), numbers(), strict=False):
        state.step()


def a_memory(folder):
    memory = Memory()
    steps(hpcrun.resumable(**parts(), folder=folder), lambda: memory.push(torch.rand(2)))


def a_deque(folder):
    last = deque(maxlen=3)
    last.append(Transition(torch.rand(2), 0.5))
    step = lambda: last.append(Transition(torch.rand(2), 0.5))  # noqa: E731
    steps(hpcrun.resumable(**parts(), folder=folder), step)


def a_second_network(folder):
    given = parts()
    target = copy.deepcopy(given["model"])
    state = hpcrun.resumable(**given, folder=folder)

    steps(state, lambda: target.weight.data.mul_(0.9))  # which leaves the tensor's version


def a_schedule(folder):
    given = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given["optimizer"], 0.9)
    state = hpcrun.resumable(**given, folder=folder)
    steps(state, lambda: (given["optimizer"].step(), scheduler.step()))


class EarlyStopping:
    def __init__(self):
        self.patience, self.best, self.waited = 3, 9.0, 0

    def __call__(self, loss):
        self.best, self.waited = min(loss, self.best), self.waited + (loss > self.best)


class AdaptiveController:
    def __init__(self):
        self.value = 0.1

    def update(self):
        self.value *= 0.9

    def state_dict(self):
        return vars(self)


class Averages(AdaptiveController):
    def __init__(self):
        self.value = torch.ones(3)


def a_rule_to_stop(folder):
    stopping = EarlyStopping()
    steps(hpcrun.resumable(**parts(), folder=folder), lambda: stopping(random.random()))


def a_coefficient(folder):
    controller = AdaptiveController()
    steps(hpcrun.resumable(**parts(), folder=folder), controller.update)


def averages(folder):
    shadow = Averages()
    steps(hpcrun.resumable(**parts(), folder=folder), shadow.update)


def a_cycle_of_files(folder):
    files = itertools.cycle(["part-0.npy", "part-1.npy", "x"])
    steps(hpcrun.resumable(**parts(), folder=folder), lambda: next(files))


CARRIED = {
    a_rule_to_stop: r"stopping \(a rule to stop, EarlyStopping\)",
    a_coefficient: r"controller \(an object with state_dict\(\), AdaptiveController\)",
    averages: r"shadow \(an object with state_dict\(\), Averages\)",
    a_cycle_of_files: r"files \(an iterator, cycle\)",
    a_generator: r"rng \(a random generator, Generator\): changes .*rng=rng\)",
    a_generator_of_torch_in_a_dict: r"draws\['noise'\] \(a random generator",
    a_generator_of_a_module: r"DRAWS \(a random generator, RandomState\)",
    a_generator_in_the_model: r"model\.draws \(a random generator, Random\)",
    an_environment: r"wrapped\[0\]\.env \(an environment, Simulation\)",
    an_iterator: r"batches \(an iterator, cycle\).*an iterator starts again after a resume",
    a_nameless_iterator: r"numbers\(\) \(a generator function, test_unsaved_state\.py:\d+\)",
    a_memory: r"memory \(a memory, Memory\)",
    a_deque: r"last \(a memory, deque\)",
    a_second_network: r"target \(a module, Linear\)",
    a_schedule: r"scheduler \(an optimizer or scheduler, ExponentialLR\)",
}


@forked
@pytest.mark.parametrize("program", CARRIED, ids=lambda one: one.__name__)
def test_what_a_loop_carries_gets_a_line(program, tmp_path, capsys):
    program(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert re.search(CARRIED[program], lines[0]), lines


@forked
def test_a_trained_tensor_in_no_model_gets_a_line(tmp_path, capsys):
    given, alpha = parts(), torch.zeros(3, requires_grad=True)
    given["optimizer"] = [given["optimizer"], torch.optim.SGD([alpha], lr=0.1)]
    for folder, others in (("a", {}), ("b", {"alpha": alpha}), ("c", {"own": {"x": [alpha]}})):
        hpcrun.resumable(**given, **others, folder=tmp_path / folder)
        printed = capsys.readouterr().err
        assert ("optimizer.1 trains a tensor of shape (3,) that is in no" in printed) == (
            not others
        )


class Trainer:
    """The object around a training, as many programs have it."""

    def __init__(self, folder):
        given = parts()
        self.model, self.optimizer = given["model"], given["optimizer"]
        self.loss, self.seen, self.average = 0.0, [], Average()
        self.state = hpcrun.resumable(**given, folder=folder)

    def reset(self):
        self.loss = 0.0

    def step(self):
        self.loss += 1.0
        self.average.update(self.loss)
        self.seen.append(torch.rand(2))
        self.state.step()


@contextlib.contextmanager
def timed():
    began = time.time()
    yield began
    print(time.time() - began)


def moved(batches):
    for batch in batches:
        yield batch.float()


def usual_loop(folder):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer)
    later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, later], milestones=[2])
    rng = np.random.default_rng(0)
    held = TensorDataset(torch.tensor(rng.random((8, 2)), dtype=torch.float32))
    dataset = Noisy()
    loader, other = (DataLoader(one, batch_size=2, shuffle=True) for one in (dataset, held))
    options, log = argparse.Namespace(lr=0.1), logging.getLogger("x")
    file, losses, recent = io.StringIO(), defaultdict(list), deque(maxlen=3)
    writer, average, bar = csv.writer(file), Average(), tqdm(total=8, file=sys.stdout)
    best = None
    state = hpcrun.resumable(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, folder=folder
    )
    for _ in state.epochs(2):
        batches = state.batches(loader)
        for number, x in enumerate(tqdm(moved(batches), file=sys.stdout)):
            with timed():
                loss = model(x).square().mean() * options.lr
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update(loss.item())
            recent.append(loss.item())
            losses["train"].append(loss.detach())
            writer.writerow([number, loss.item()])
            log.debug(number)
            bar.update()
            best = copy.deepcopy(model)
            with torch.no_grad():
                [best(y) for (y,) in other]
            fresh = np.random.default_rng(state.steps)
            fresh.random()
            state.step()


def object_loop(folder):
    trainer = Trainer(folder)
    steps(trainer, int)


def passed_loop(folder):
    env, rng, given = Simulation(), random.Random(1), parts()
    memory, target = deque(maxlen=9), copy.deepcopy(given["model"])
    state = hpcrun.resumable(
        **given, envs=[env], rng=rng, memory=memory, target=target, folder=folder
    )

    def work():
        memory.append((env.step(), rng.random()))
        with torch.no_grad():
            target.weight.mul_(0.9)

    steps(state, work)


def kept_loop(folder):
    import pickle

    env, rng, state = Simulation(), random.Random(1), hpcrun.resumable(**parts(), folder=folder)
    for _ in range(4):
        env.step()
        state.step(keep=(pickle.dumps(env), rng.getstate()))


class StepTimer:
    """A meter with the methods of an environment and of a scheduler."""

    def __init__(self):
        self.ends = []

    def reset(self):
        self.ends = []

    def step(self):
        self.ends.append(time.time())

    def state_dict(self):
        return {"ends": self.ends}


def measuring_loop(folder):
    timer, number = StepTimer(), itertools.count(1)
    state = hpcrun.resumable(**parts(), folder=folder)
    steps(state, lambda: (timer.step(), next(number)))


class Stats:
    def __init__(self):
        self.total, self.each, self.device = 0.0, defaultdict(list), torch.device("cpu")

    def update(self, value):
        self.total += value
        self.each["loss"].append(torch.tensor(value))

    def state_dict(self):
        return {"total": self.total, "each": dict(self.each)}


def endless(loader):
    while True:
        yield from loader


def spinning_loop(folder):
    spinner, colors = itertools.cycle("|/-\\"), itertools.cycle(["r", "g"])
    marks, stats = itertools.cycle(["⠋", "⠙", " ."]), Stats()
    state = hpcrun.resumable(**parts(), folder=folder)
    steps(state, lambda: ([next(one) for one in (spinner, colors, marks)], stats.update(0.5)), 8)


def validating_loop(folder):
    order, draws = torch.Generator(), np.random.default_rng(0)
    held = TensorDataset(torch.rand(6, 2))
    seen = Noisy()
    seen.draws = draws
    validation = DataLoader(held, batch_size=2, shuffle=True, generator=order)
    other = DataLoader(seen, batch_size=2)
    single = endless(DataLoader(held, batch_size=1, shuffle=True))
    state = hpcrun.resumable(**parts(), folder=folder)

    def work():
        [list(one) for one in (validation, other)]
        if state.steps % 3 == 2:
            next(single)

    steps(state, work, 8)


@forked
@pytest.mark.parametrize(
    "program",
    [
        usual_loop,
        object_loop,
        passed_loop,
        kept_loop,
        measuring_loop,
        spinning_loop,
        validating_loop,
    ],
)
def test_usual_loops_get_no_line(program, tmp_path, capsys):
    program(tmp_path)
    assert "hpcrun:" not in capsys.readouterr().err
