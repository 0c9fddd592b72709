"""PPO on environments of gymnasium that resumes with the bits of an undisturbed run.

Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347), in the form of short public programs.
The lines with a comment that begins with "hpcrun" make it resumable.

    pip install gymnasium
    hpcrun submit -- python examples/reinforcement.py
"""

import argparse
import hashlib

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import hpcrun  # hpcrun 1

GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2


class Agent(nn.Module):
    """A policy and a value of the state."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, actions))
        self.value = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 1))


def advantages(rewards, values, dones, last):
    """Return the generalized advantages (Schulman et al. 2016, arXiv:1506.02438), shape (steps, envs)."""
    found = torch.zeros_like(rewards)
    ahead, following = torch.zeros_like(last), last
    for t in reversed(range(len(rewards))):
        alive = 1 - dones[t]
        ahead = rewards[t] + GAMMA * following * alive - values[t] + GAMMA * LAMBDA * alive * ahead
        found[t], following = ahead, values[t]
    return found


def rollout(agent, envs, observation, steps):
    """Let the policy act for some steps; return what it saw and did, and the last observation."""
    rows = []
    for _ in range(steps):
        now = torch.as_tensor(observation, dtype=torch.float32)
        with torch.no_grad():
            choice = Categorical(logits=agent.policy(now))
            action = choice.sample()
            row = [now, action, choice.log_prob(action), agent.value(now).squeeze(-1)]
        observation, reward, ended, cut, _ = envs.step(action.numpy())
        done = torch.as_tensor(np.logical_or(ended, cut), dtype=torch.float32)
        rows.append([*row, torch.as_tensor(reward, dtype=torch.float32), done])
    return [torch.stack(column) for column in zip(*rows, strict=True)], observation


def main() -> None:
    """Train, and print a hash of the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64, help="of each environment in an update")
    parser.add_argument("--every", type=int, default=10, help="updates between checkpoints")
    options = parser.parse_args()

    torch.manual_seed(0)
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * options.envs)
    observation, _ = envs.reset(seed=0)
    agent = Agent(envs.single_observation_space.shape[0], envs.single_action_space.n)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    order = np.random.default_rng(0)
    best = {"return": 0.0}

    # hpcrun 2: also all that has a state and is no part of the model
    state = hpcrun.resumable(
        model=agent, optimizer=optimizer, envs=envs, order=order, best=best, every=options.every
    )
    if state.kept is not None:  # hpcrun 3: the observation before the interruption
        observation = state.kept
    while state.steps < options.updates:  # hpcrun 4, was: for update in range(options.updates)
        rows, observation = rollout(agent, envs, observation, options.steps)
        seen, actions, old, values, rewards, dones = rows
        with torch.no_grad():
            last = agent.value(torch.as_tensor(observation, dtype=torch.float32)).squeeze(-1)
        gains = advantages(rewards, values, dones, last)
        goals = (gains + values).flatten()
        seen, actions, old, gains = (one.flatten(0, 1) for one in (seen, actions, old, gains))
        for _ in range(4):
            for part in np.array_split(order.permutation(len(seen)), 4):
                chosen = Categorical(logits=agent.policy(seen[part]))
                ratio = (chosen.log_prob(actions[part]) - old[part]).exp()
                gain = (gains[part] - gains[part].mean()) / (gains[part].std() + 1e-8)
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = -torch.min(ratio * gain, clipped * gain).mean()
                loss = loss - 0.01 * chosen.entropy().mean()
                loss = loss + (agent.value(seen[part]).squeeze(-1) - goals[part]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        best["return"] = max(best["return"], rewards.sum().item())
        state.step(keep=observation)  # hpcrun 5: last line of an update
    state.finish()  # hpcrun 6

    weights = b"".join(w.detach().numpy().tobytes() for w in agent.parameters())
    print(f"best return {best['return']:g}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
