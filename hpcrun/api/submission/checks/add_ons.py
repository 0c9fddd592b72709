"""Check that some installed package has the add-ons that a config names."""

from collections.abc import Iterator

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.errors import UserError
from hpcrun.ports.entry_points import NODE_CHECKS, SINKS, STRATEGIES

# With these, the packages of a rank are not those of this shell.
_VARIABLES = frozenset({"PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


def missing_add_ons(submission: Submission) -> Iterator[Concern]:
    """Find names of add-ons that no installed package has.

    Silent about those of the ranks if the job may have another environment. The batch step, which asks the
    strategies, has this one.
    """
    config, job = submission.config, submission.config.job
    elsewhere = job.python or job.image or job.container or job.setup or _VARIABLES & set(job.env)
    named = {
        "watch.sinks": [] if elsewhere else config.watch.sinks,
        "job.node_checks": [] if elsewhere else job.node_checks,
        "restarts.strategies": config.restarts.strategies,
    }
    for (key, names), port in zip(named.items(), (SINKS, NODE_CHECKS, STRATEGIES), strict=True):
        for name in names:
            try:
                if name not in port.own:
                    port.find(name)
            except UserError as error:
                yield Concern(str(error), key, refused=True)
