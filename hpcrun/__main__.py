"""``python -m hpcrun COMMAND``, and the program ``hpcrun``."""

import sys
from typing import NoReturn


def run(*words: str) -> NoReturn:
    """Run the command ``words`` with the arguments of this process; Ctrl-C prints no traceback of imports."""
    try:
        from hpcrun.cli.main import main
    except KeyboardInterrupt:
        from hpcrun.exit_codes import INTERRUPTED

        sys.exit(INTERRUPTED)
    main([*words, *sys.argv[1:]])


if __name__ == "__main__":
    run()
