"""A line for a script of one process that was started once per GPU: each copy trains the same model.

The copies overwrite each other's files, and all of them end well. A distributed training makes a process
group, for which rank 0 listens at MASTER_PORT.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hpcrun.job.script.rank_words import knows_ranks

_LISTENS = "0A"
_LINES, _BYTES = 3, 1 << 16
_NUMBER, _FIGURES = re.compile(rb"\d\.\d"), re.compile(rb"[-+]?\d[\d.e+-]*")


class CopyWatch:
    """Watches if the ranks of a script become one training; for the process that started rank 0.

    Args:
        command: the script with its interpreter and arguments.
        folder: the working folder of the ranks.
        logs: the folder with the logs of the ranks, ``rank-00000.log`` and so on.
        port: the port at which a process group of the ranks listens.
        ranks: number of ranks.
        after: seconds after the start at which the line is printed, if the source of the script shows that
            it knows no ranks. If this is unknown, the line comes at the end, if all ranks have printed the
            same numbers.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        logs: Path,
        port: int,
        ranks: int,
        *,
        after: float = 15.0,
    ) -> None:
        self._command, self._folder, self._logs = command, folder, logs
        self._port, self._ranks = port, ranks
        self._done, self._unknown = ranks == 1, False
        self._next_look, self._due = 0.0, time.monotonic() + after

    def look(self, *, ended: bool = False) -> None:
        """Print the line if it is due; call it often.

        Args:
            ended: the script of rank 0 has ended well.
        """
        now = time.monotonic()
        if self._done or (now < self._next_look and not ended):
            return
        self._next_look = now + 1.0
        if is_listening(self._port):
            self._done = True
        elif self._unknown:
            self._done = ended
            if ended and same_numbers(self._logs, self._ranks):
                self._print()
        elif ended or now >= self._due:
            knows = knows_ranks(self._command, self._folder)
            self._done, self._unknown = knows is not None, knows is None
            if knows is False:
                self._print()
            elif self._unknown and ended:
                self.look(ended=True)

    def _print(self) -> None:
        command = " ".join(self._command)[:80]
        print(
            f"hpcrun: {command}: {self._ranks} copies of it run, and they make no process group, so they are "
            "separate trainings that overwrite each other's files; pass --nodes 1, with --launcher none for "
            "one process with all GPUs, or with --gpus 1 for one GPU; one training on all ranks needs "
            "torch.distributed.init_process_group()",
            file=sys.stderr,
            flush=True,
        )


def is_listening(port: int) -> bool:
    """Return True if a process of this host listens at the TCP port (proc_net_tcp in the kernel's docs)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        for words in map(str.split, lines):
            if words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port:
                return True
    return False


def same_numbers(logs: Path, ranks: int) -> bool:
    """Return True if all ranks have printed the same lines, and a loop printed some of them with decimals.

    The lines of a loop differ in their numbers only; those about versions and devices have other words.
    """
    try:
        texts = [_printed(logs / f"rank-{rank:05d}.log") for rank in range(ranks)]
    except OSError:  # no log of a rank: nothing can be compared
        return False
    shortest = min(map(len, texts))
    lines = {line for line in texts[0][:shortest] if _NUMBER.search(line)}
    forms = Counter(_FIGURES.sub(b"0", line) for line in lines)
    looped = max(forms.values(), default=0) >= _LINES
    return looped and all(text[:shortest] == texts[0][:shortest] for text in texts)


def _printed(log: Path) -> list[bytes]:
    with log.open("rb") as file:
        lines = file.read(_BYTES).splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n") and not line.startswith(b"hpcrun: ")]
