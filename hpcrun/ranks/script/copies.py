"""A line for a program that was started once per GPU, so that its copies do the same work.

The copies overwrite each other's files, and all of them end well. A distributed training makes a process
group, for which rank 0 listens at MASTER_PORT. The ranks of MPI meet through the PMI of srun.
"""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hpcrun.config.commands.command import script_of
from hpcrun.config.commands.rank_words import knows_ranks, trainer_makes_group, uses_mpi

_LISTENS = "0A"
_LINES, _BYTES = 3, 1 << 16
# Variables of a rank that MPI can join: Slurm's plugins pmi2, pmix and cray_shasta, or another launcher.
_PMI = ("PMI_", "PMI2_", "PMIX_", "PALS_", "OMPI_COMM_WORLD_", "MPI_LOCALRANKID", "MV2_COMM_WORLD_")
_DECIMAL = re.compile(rb"\d+\.\d+(?:e[-+]?\d+)?")
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
        environ: the variables of the ranks.
        note: called with the line, to record it.
        launched: a launcher of PyTorch starts ``command``, a script, and listens at the port itself, so only
            the source counts.
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
        environ: Mapping[str, str] | None = None,
        note: Callable[[str], None] = lambda _: None,
        launched: bool = False,
    ) -> None:
        self._environ, self._note = environ, note
        self._command, self._folder, self._logs = command, folder, logs
        self._port, self._ranks = None if launched else port, ranks
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
        if self._port is not None and is_listening(self._port):
            self._done = True
        elif self._unknown:
            self._done = ended
            if ended:
                self._print(self._line_at_end())
        elif ended or now >= self._due:
            knows = knows_ranks(self._with_interpreter(), self._folder)
            self._done, self._unknown = knows is False, knows is not False
            if knows is False:
                self._print(_SEPARATE)
            elif ended:
                self.look(ended=True)

    def _with_interpreter(self) -> Sequence[str]:
        script = script_of(self._command, launched=True) if self._port is None else None
        if script is None:
            return self._command
        return ["python", *self._command[self._command.index(script) :]]

    def _line_at_end(self) -> str | None:
        """Return the words about copies if their source knows of ranks or is unknown; None: no evidence."""
        command, folder, logs = self._command, self._folder, self._logs
        if self._port is None or was_used(self._port):
            return None
        alone = self._environ is not None and not any(map(_is_of_pmi, self._environ))
        if alone and uses_mpi(command, folder) and printed_alike(logs, self._ranks):
            return _NO_PMI
        if trainer_makes_group(command, folder):
            return _NO_TRAINER_GROUP
        knows = knows_ranks(command, folder)
        return _SEPARATE if knows is None and same_numbers(logs, self._ranks) else None

    def _print(self, words: str | None) -> None:
        if words is None:
            return
        line = f"{' '.join(self._command)[:80]}: {self._ranks} copies of it run, {words}"
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        self._note(line)


_SEPARATE = (
    "and they make no process group, so they are separate trainings that overwrite each other's files; "
    "pass --nodes 1, with --launcher none for one process with all GPUs, or with --gpus 1 for one GPU; one "
    "training on all ranks needs torch.distributed.init_process_group()"
)
_NO_PMI = (
    "each as rank 0 of 1: srun gave this MPI program no PMI; pass job.srun_args=[--mpi=pmi2], or another "
    "type of `srun --mpi=list` that its MPI library knows (the local cluster has none)"
)
_NO_TRAINER_GROUP = (
    "and Lightning's trainer has made no process group, so they are separate trainings; give Trainer "
    "devices=, num_nodes= and strategy='ddp' for all ranks, or pass --nodes 1 --gpus 1"
)


def _is_of_pmi(name: str) -> bool:
    return name.startswith(_PMI)


def is_listening(port: int) -> bool:
    """Return True if a process of this host listens at the TCP port (proc_net_tcp in the kernel's docs)."""
    return any(
        words[3] == _LISTENS and int(words[1].rpartition(":")[2], 16) == port
        for words in _sockets()
    )


def was_used(port: int) -> bool:
    """Return True if a socket of this host has used the TCP port, perhaps until a moment ago (TIME_WAIT)."""
    return any(
        int(address.rpartition(":")[2], 16) == port
        for words in _sockets()
        for address in words[1:3]
    )


def _sockets() -> Iterator[list[str]]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # a kernel without IPv6
            continue
        yield from map(str.split, lines)


def printed_alike(logs: Path, ranks: int) -> bool:
    """Return True if all ranks have printed the same lines; numbers with decimals may differ, such as times.

    Ranks of MPI that know each other print other numbers, or only rank 0 prints.
    """
    try:
        texts = [_printed(logs / f"rank-{rank:05d}.log") for rank in range(ranks)]
    except OSError:  # no log of a rank: nothing can be compared
        return False
    shortest = min(map(len, texts))
    forms = {_DECIMAL.sub(b"0", b"".join(text[:shortest])) for text in texts}
    return len(forms) == 1 and shortest > 0


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
