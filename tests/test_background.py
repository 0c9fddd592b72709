"""Starting in the background of a shell changes neither the tests nor a followed run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

KEYS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
MUTED = ("sh", "-c", 'trap "" INT QUIT HUP; exec "$@"', "sh")
"""As a shell without job control starts `nohup COMMAND &`."""

IGNORED = """
def ignored():
    with open("/proc/self/status") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn"))
    return [number for number in (1, 2, 3) if mask >> number - 1 & 1]
"""

RANK = f"""
import os, time
{IGNORED}
with open("heard-" + os.environ["RANK"] + ".part", "w") as heard:
    heard.write(str(ignored()))
os.rename(heard.name, heard.name.removesuffix(".part"))
late = time.monotonic() + {jobs.PATIENCE}
while not os.path.exists("go") and time.monotonic() < late:
    time.sleep(0.05)
"""


def test_programs_of_a_test_ignore_no_signal() -> None:
    program = IGNORED + "print(ignored())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"[]\n"


def test_a_run_followed_in_the_background_survives_keys(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    words = ("submit", "--name", "quiet", "--executor", "local", "--cpu", "--gpus", "2", "--")
    following = subprocess.Popen(
        [*MUTED, sys.executable, "-m", "hpcrun", *words, sys.executable, "rank.py"],
        cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        heard = [tmp_path / f"heard-{rank}" for rank in range(2)]
        jobs.wait_for(lambda: all(path.exists() for path in heard))
        for key in KEYS:
            os.killpg(following.pid, key)
        assert [path.read_text() for path in heard] == ["[]", "[]"]
        assert following.poll() is None
        (tmp_path / "go").touch()
        assert following.wait(jobs.PATIENCE) == 0
    finally:
        following.kill()
    run = RunDirectory(tmp_path / "runs" / "quiet")
    jobs.wait_for_end(run)
    assert jobs.result(run)["state"] == "finished"
