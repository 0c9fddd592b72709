"""Start a run on several hosts without a scheduler: the hosts agree on the run, then each becomes torchrun.

Node 0 listens on --master_port. The other hosts connect and send what they were asked to train. Node 0 makes
the run directory when all hosts agree, and each host checks that it sees this directory. A mistake ends all
hosts with one line, before any rank starts. Node 0 sends the first line of a connection: another program at
the port gets no data.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

# This checkout's modules come before an installed package.
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from multinodelib.joining import join  # noqa: E402
from multinodelib.messages import Asked  # noqa: E402
from multinodelib.serving import serve  # noqa: E402

from hpcrun.devices.devices import visible_gpus  # noqa: E402
from hpcrun.errors import UserError  # noqa: E402

_SEEN_WITHIN = 120.0
"""Seconds for a shared folder to show a new file: an NFS client keeps old answers for a minute (nfs(5))."""


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return this tool's options, and the words for `hpcrun submit`."""
    parser = argparse.ArgumentParser(
        prog="tools/train_multinode.sh",
        allow_abbrev=False,
        description="Train one run on several hosts that share a folder, without a scheduler.",
        epilog="Other arguments go to `hpcrun submit`: --config, --name, --runs-dir, --cpu, key.sub=value.",
    )
    number = _number("a number from 0")
    for name, kind, default, text in (
        ("--num_nodes", number, 1, "hosts in all"),
        ("--node_rank", number, 0, "this host, from 0"),
        ("--num_gpus", str, "gpu", "ranks on this host (default: its visible GPUs)"),
        ("--master_addr", str, None, "name or address of node 0 for all hosts"),
        ("--master_port", number, 29500, "a free port of node 0"),
        ("--wait", float, 600.0, "seconds to wait for the other hosts"),
    ):
        # A name with hyphens works too.
        names = dict.fromkeys((name, name.replace("_", "-")))
        shown = f"{text} (default {default:g})" if isinstance(default, int | float) else text
        metavar = "HOST" if name == "--master_addr" else "N"
        parser.add_argument(*names, type=kind, default=default, metavar=metavar, help=shown)
    end = words.index("--") if "--" in words else len(words)
    found, rest = parser.parse_known_args(words[:end])
    return found, [*rest, *words[end:]]


def _number(expected: str) -> Any:
    def read(word: str) -> int:
        if not (word.isdecimal() and word.isascii()):
            raise argparse.ArgumentTypeError(f"{word!r} is not {expected}")
        return int(word)

    return read


def check(options: argparse.Namespace) -> int:
    """Return the number of ranks of this host; raises UserError for options that cannot work."""
    nodes, node = options.num_nodes, options.node_rank
    if nodes < 1:
        raise UserError("--num_nodes 0: there is at least one host; give their number")
    if nodes > 1 and not options.master_addr:
        raise UserError("--master_addr is missing: give the name or address of node 0 on all hosts")
    if node >= nodes:
        raise UserError(f"--node_rank {node} is not below --num_nodes {nodes}; nodes count from 0")
    if not 0 < options.master_port < 65536:
        raise UserError(
            f"--master_port {options.master_port}: a port is 1 to 65535; 29500 is usual"
        )
    if options.num_gpus in ("gpu", "auto"):
        gpus = visible_gpus(os.environ)
        if not gpus:
            print(
                "hpcrun: no GPU is visible: 1 rank on the CPU; --num_gpus N starts N ranks",
                flush=True,
            )
        return gpus or 1
    if not options.num_gpus.isdecimal() or int(options.num_gpus) < 1:
        raise UserError(
            f"--num_gpus {options.num_gpus}: give the ranks of this host, or omit the option"
        )
    return int(options.num_gpus)


class Submission:
    """The `hpcrun submit` of this host, which makes the run directory but no job."""

    def __init__(self, options: argparse.Namespace, ranks: int, words: list[str]) -> None:
        counts = ("--nodes", str(options.num_nodes), "--gpus", str(ranks))
        end = words.index("--") if "--" in words else len(words)
        self._words = [*counts, *words[:end], "--prepare", "--json"]
        self._after = words[end:]

    def _answer(self, *more: str, quiet: bool = False) -> dict[str, Any]:
        command = [sys.executable, "-m", "hpcrun", "submit", *self._words, *more, *self._after]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                done.stderr.strip().removeprefix("hpcrun: ") or "`hpcrun submit` has failed"
            )
        if not quiet:
            print(done.stderr, end="", file=sys.stderr, flush=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def plan(self) -> tuple[str, dict[str, Any]]:
        """Return the path of the run and its config, without a change on the disk."""
        found = self._answer("--dry-run", quiet=True)
        return found["run"], found["config"]

    def carry_out(self) -> dict[str, Any] | None:
        """Make the run directory and return its record; None if the run is finished."""
        found = self._answer()
        return None if "result" in found else record_of(found["run"])


def record_of(run: str) -> dict[str, Any]:
    """Return the facts that only this run has; empty if this host does not see the run."""
    try:
        record = json.loads((Path(run) / "run.json").read_text())
        return {key: record.get(key) for key in ("created", "host", "folder")}
    except (OSError, ValueError):
        return {}


def wait_for_record(run: str, record: dict[str, Any]) -> None:
    """Wait until this host sees the run directory of node 0; raises UserError if it does not."""
    late = time.monotonic() + _SEEN_WITHIN
    while record_of(run) != record:
        if time.monotonic() > late:
            raise UserError(
                f"{run}: {'is another run' if record_of(run) else 'is not visible'} on this host; --runs-dir "
                "has to be a folder that all hosts share (NFS, Lustre), under the same path"
            )
        time.sleep(0.2)


def become_torchrun(options: argparse.Namespace, ranks: int, run: str) -> NoReturn:
    """Replace this process by torchrun. Its restarts are off: a person decides on a restart."""
    os.execv(
        sys.executable,
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={options.num_nodes}"),
            *(f"--node-rank={options.node_rank}", f"--nproc-per-node={ranks}"),
            *(
                f"--master-addr={options.master_addr or '127.0.0.1'}",
                f"--master-port={options.master_port}",
            ),
            *("--max-restarts=0", "-m", "hpcrun.worker", run),
        ],
    )


def main(words: list[str]) -> int:
    """Start this host's part of the run; return an exit code if no rank is to start."""
    options, rest = parse(words)
    ranks = check(options)
    submission = Submission(options, ranks, rest)
    run, config = submission.plan()
    asked = Asked(options.node_rank, options.num_nodes, run, config)
    place = (options.master_addr, options.master_port)
    if options.num_nodes == 1:
        done = submission.carry_out() is None
    elif options.node_rank == 0:
        done = serve(asked, place, submission.carry_out, options.wait)
    else:
        done = join(asked, place, wait_for_record, options.wait)
    if done:
        print("hpcrun: this run is finished already; for a new one choose another --name")
        return 0
    become_torchrun(options, ranks, run)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"hpcrun: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("hpcrun: interrupted; no rank was started", file=sys.stderr)
        sys.exit(130)
