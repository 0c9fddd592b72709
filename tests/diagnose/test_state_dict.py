"""Keys that differ by a wrapper are the same model; other keys or sizes are another model."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hpcrun.diagnose.explanations import explained, known_cause
from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.read_log import labeled
from hpcrun.diagnose.state_dict import wrapper_in

State = dict[str, torch.Tensor]


class Net(nn.Module):
    """A model with the buffers of BatchNorm, of which ``load_state_dict`` makes one by itself."""

    def __init__(self, out: int = 1, extra: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.fc = nn.Linear(2, out)
        if extra:
            self.head = nn.Linear(3, 3)


def under(prefix: str, model: nn.Module) -> State:
    return {f"{prefix}{name}": value for name, value in model.state_dict().items()}


def compiled() -> nn.Module:
    made: nn.Module = torch.compile(Net(), backend="eager")  # type: ignore[assignment]
    return made


def inside(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Return a model of which only a part is wrapped."""
    model = Net()
    model.encoder = wrap(model.encoder)  # type: ignore[assignment]
    return model


def error(model: nn.Module, state: State) -> str:
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict(state)
    return str(raised.value)


def diagnosis(message: str, rank: str = "") -> FailureFinding:
    text = "Traceback (most recent call last):\n" + f"RuntimeError: {message}"
    lines = (labeled(rank + line, "job.log", at) for at, line in enumerate(text.splitlines(), 1))
    found = find_cause(lines)
    assert found is not None
    return found


def test_keys_that_differ_by_a_wrapper_are_the_same_model() -> None:
    both = nn.DataParallel(Net())
    for model, state, words in (
        (Net(), under("module.", Net()), 'checkpoint have "module."'),
        (Net(), under("_orig_mod.", Net()), 'checkpoint have "_orig_mod."'),
        (Net(), under("_orig_mod.module.", Net()), 'checkpoint have "_orig_mod.module."'),
        (Net(), under("_fsdp_wrapped_module.", Net()), 'checkpoint have "_fsdp_wrapped_module."'),
        (Net(), under("model.", Net()), 'checkpoint have "model."'),
        (Net(), inside(nn.DataParallel).state_dict(), 'checkpoint have "module."'),
        (both, Net().state_dict(), 'model have "module."'),
        (compiled(), Net().state_dict(), 'model have "_orig_mod."'),
        (inside(nn.DataParallel), Net().state_dict(), 'model have "module."'),
        (compiled(), under("module.", Net()), 'those of the model have "_orig_mod."'),
    ):
        message = error(model, state)
        found = diagnosis(message, "[rank1]: ")
        assert (found.id, found.confidence, found.rank) == ("checkpoint-wrapped", "high", 1), words
        assert words in found.notes[0]
        assert "model.module" in found.remedy
        assert dict(found.folded) == {}
        known = known_cause(message)
        assert known is not None
        assert known.id == "checkpoint-wrapped"
        assert "Error(s) in loading state_dict for" in (explained(message) or "")


def test_other_keys_or_sizes_are_another_model() -> None:
    for model, state in (
        (Net(), under("module.", Net(extra=True))),
        (Net(extra=True), under("module.", Net())),
        (Net(), Net(extra=True).state_dict()),
        (Net(extra=True), Net().state_dict()),
        (Net(), Net(out=5).state_dict()),
        (Net(), {"module.other": torch.ones(1)}),
        (Net(), {}),
    ):
        message = error(model, state)
        assert wrapper_in(message) is None
        assert diagnosis(message).id == "checkpoint-other-model"
    # A wrapped part, and a layer of another size.
    message = error(nn.ModuleList([Net()]), under("module.0.", Net(out=5)))
    both = message + "\n\tsize mismatch for fc.weight: copying a param with shape torch.Size([5])"
    assert diagnosis(message).id == "checkpoint-wrapped"
    assert diagnosis(both).id == "checkpoint-other-model"


def test_the_two_ends_of_a_long_list_are_compared() -> None:
    names = [f"layers.{layer}.attention.weight" for layer in range(2000)]
    for prefix, expected in (
        ("module.", "checkpoint-wrapped"),
        ("other.", "checkpoint-other-model"),
    ):
        lists = []
        for what, before in (("Missing", ""), ("Unexpected", prefix)):
            text = f"\t{what} key(s) in state_dict: " + ", ".join(
                f'"{before}{one}"' for one in names
            )
            lists.append(f"{text[:8192]} … {text[-8192:]}")
        renamed = [lists[0], lists[1].replace("other.layers.3.", "other.blocks.3.")]
        message = "\n".join(["Error(s) in loading state_dict for Net:", *renamed])
        assert diagnosis(message).id == expected
