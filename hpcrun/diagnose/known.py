"""Errors of torch and gloo that say what broke, and not what the person who reads them can do about it."""

import re

_FEWER_GRADIENTS = (
    "in the step before, parameters had no gradient that DDP waits for; if that is meant, set "
    "train.find_unused_parameters=true, else take them out of the model"
)
_CROSSED = (
    "ranks came to different collectives, and need the same ones in the same order; under fsdp let all run "
    "the same blocks, and set train.find_unused_parameters=true where they use other parameters of them"
)
_KNOWN = {
    "Expected to have finished reduction in the prior iteration": _FEWER_GRADIENTS,
    # gloo, which then ends the process.
    "Received data size doesn't match expected size": _CROSSED,
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL.
    "Detected mismatch between collectives on ranks": _CROSSED,
}
_PATTERN = re.compile("|".join(map(re.escape, _KNOWN)))


def explained(message: str) -> str | None:
    """The words of ``message`` that are known, with the cause and a remedy; None where none are."""
    found = _PATTERN.search(message)
    return f"{found[0]}: {_KNOWN[found[0]]}" if found else None
