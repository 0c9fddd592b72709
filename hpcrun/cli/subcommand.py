"""The second word of a command, such as ``show`` in ``hpcrun config show``."""

import difflib
from collections.abc import Sequence

from hpcrun.errors import UserError


def require_subcommand(command: str, word: str | None, known: Sequence[str], kind: str) -> str:
    """Return ``word`` if it is one of ``known``.

    Args:
        kind: the noun for the second word, such as ``view``.

    Raises:
        UserError: the word is missing or unknown; the text names the nearest word, or all of them.
    """
    if word in known:
        return str(word)
    near = difflib.get_close_matches(word or "", known, n=1)
    all_of_them = " or ".join(f"`{command} {name}`" for name in known)
    hint = f"did you mean {near[0]}?" if near else f"write {all_of_them}"
    raise UserError(
        f"{command} {word}: there is no such {kind}; {hint}" if word else f"{command}: {hint}"
    )
