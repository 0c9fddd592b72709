"""The example of reinforcement learning ends with the same weights after two kills."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.on_ranks import forked
from tests.support.training.forks import fork_ranks

ROOT = Path(__file__).parents[2]


@forked
def test_two_kills_change_no_weight_of_the_policy(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    from examples import reinforcement

    monkeypatch.setattr(sys, "argv", ["r", "--updates=7", "--envs=2", "--steps=16", "--every=2"])
    compute = reinforcement.advantages

    def start(folder, kill_at=0):
        """Train in ``folder``; end by SIGKILL in an update."""
        (tmp_path / folder).mkdir(exist_ok=True)
        calls = 0

        def counted(*values):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return compute(*values)

        def play(_):
            os.chdir(tmp_path / folder)
            reinforcement.advantages = counted
            reinforcement.main()

        logs = tmp_path / f"logs-{folder}"
        logs.mkdir(exist_ok=True)
        return fork_ranks(1, play, logs), (logs / "rank-0.log").read_text()

    code, text = start("whole")
    assert code == [0]
    assert [start("cut", kill_at=at)[0] for at in (4, 3)] == [[-signal.SIGKILL]] * 2
    code, cut = start("cut")
    assert code == [0]
    assert "hpcrun: resumed after step" in cut
    assert "no checkpoint has it" not in text + cut
    end = re.compile(r"best return .*, weights \w{16}")
    assert end.findall(text) == end.findall(cut) != []


def test_the_page_shows_the_lines_of_the_example():
    page = (ROOT / "docs" / "reinforcement-learning.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "reinforcement.py").read_text(encoding="utf-8")
    block = page.split("```python\n")[1].split("```")[0]
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    assert len(lines) > 8
    assert [line for line in lines if line not in example and line != "..."] == []
