"""``python -m hpcrun.submit``: the same as ``hpcrun submit``."""

import sys

if __name__ == "__main__":
    from hpcrun.__main__ import run

    run("submit")
elif __name__ == "hpcrun.submit":
    from hpcrun.api.submission.submitting import submit

    # ``import hpcrun.submit`` must leave the function ``hpcrun.submit`` in place.
    sys.modules[__name__] = submit  # type: ignore[assignment]
