"""The keys that ``load_state_dict`` names in its error: another model, or the same model under a wrapper.

DDP, DataParallel, FSDP, ``torch.compile`` and activation checkpointing add a word to each key. A checkpoint
of the wrapped model then lacks every key of the plain model, and has as many unexpected keys.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

OTHER_MODEL, WRAPPED = "checkpoint-other-model", "checkpoint-wrapped"
"""The entries of the catalog between which the keys decide."""

_WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
)
_BEGIN = "Error(s) in loading state_dict for"
_LISTS = re.compile(r"(Missing|Unexpected) key\(s\) in state_dict: (.*)", re.DOTALL)
_NAME = re.compile(r'"([^"]+)"')
# A long line has only its two ends, see read_log.
_CUT = " … "
_SIZES = "size mismatch for "
# BatchNorm makes this key if the checkpoint lacks it, so that it is never missing.
_MADE = "num_batches_tracked"


@dataclass
class LoadedKeys:
    """The keys of the errors of one source, read line by line."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    certain: bool = False
    _cut: bool = False
    _complete: bool = False
    _found: "list[str | None]" = field(default_factory=list)

    def add(self, text: str) -> None:
        """Read a line."""
        if _BEGIN in text and self._complete:
            self._end()
        if _SIZES in text:
            self.certain = True
        found = _LISTS.search(text)
        if found is None:
            return
        head, cut, _ = found[2].partition(_CUT)
        names = self.missing if found[1] == "Missing" else self.unexpected
        names += (name for name in _NAME.findall(head) if not name.endswith(_MADE))
        self._cut = self._cut or bool(cut)
        self._complete = self._complete or found[1] == "Unexpected"

    def wrapper(self) -> str | None:
        """Return a sentence about the wrapper in the keys; None if the checkpoint is of another model."""
        self._end()
        if self.certain or not self._found or not all(self._found):
            return None
        return self._found[0]

    def _end(self) -> None:
        """Close the keys of one error."""
        if self.missing or self.unexpected:
            self._found.append(_difference(self.missing, self.unexpected, cut=self._cut))
        self.missing, self.unexpected = [], []
        self._complete = self._cut = False


def wrapper_in(message: str) -> str | None:
    """Return :meth:`LoadedKeys.wrapper` for a whole message."""
    keys = LoadedKeys()
    for line in message.splitlines():
        keys.add(line)
    return keys.wrapper()


def _difference(missing: list[str], unexpected: list[str], *, cut: bool) -> str | None:
    """Return what distinguishes the keys of model and checkpoint if only a wrapper does, else None."""
    if not missing:
        # The model has its own keys: only the word of a wrapper in every other key is a proof.
        words = _words(unexpected[0])
        return _sentence(words, []) if words and all(map(_words, unexpected)) else None
    if not unexpected:
        return None
    if cut:
        count = min(len(missing), len(unexpected))
        missing, unexpected = missing[:count], unexpected[:count]
    of_checkpoint = next(filter(None, map(_words, unexpected)), [])
    of_model = next(filter(None, map(_words, missing)), [])
    if of_checkpoint != of_model and _plain(missing) == _plain(unexpected):
        return _sentence(of_checkpoint, of_model)
    if prefix := _prefix(longer=unexpected, shorter=missing):
        return _sentence([prefix], [])
    if prefix := _prefix(longer=missing, shorter=unexpected):
        return _sentence([], [prefix])
    return None


def _words(name: str) -> list[str]:
    """Return the words of wrappers in ``name``, in their order."""
    return [part for part in name.split(".") if part in _WRAPPERS]


def _plain(names: Iterable[str]) -> set[str]:
    """Return the names without the words of wrappers."""
    return {".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}


def _prefix(*, longer: list[str], shorter: list[str]) -> str:
    """Return the words that each of ``longer`` has before a name of ``shorter``; empty without such words."""
    before, found, rest = longer[0].partition(f".{shorter[0]}")
    fits = found and not rest and {f"{before}.{name}" for name in shorter} == {*longer}
    return before if fits else ""


def _sentence(of_checkpoint: list[str], of_model: list[str]) -> str:
    def have(words: list[str]) -> str:
        return f'have "{".".join(words)}."' if words else "do not"

    if not of_checkpoint:
        return f"the keys of the model {have(of_model)}, those of the checkpoint do not"
    return f"the keys of the checkpoint {have(of_checkpoint)}, those of the model {have(of_model)}"
