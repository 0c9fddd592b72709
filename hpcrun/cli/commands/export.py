"""Write a run's model to a file or folder.

Plain PyTorch loads a .pt file and a folder of `--format dcp`, any safetensors
reader a .safetensors file, and Hugging Face's from_pretrained a folder of
`--format safetensors`.
"""

import argparse
from pathlib import Path

from pydantic import ValidationError

from hpcrun.cli.arguments import add_saved, find_saved
from hpcrun.config import load_resolved
from hpcrun.config.tasks import options_for
from hpcrun.config.tasks.hugging_face import FILE, config_json
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.errors import UserError
from hpcrun.printing import BAR_DELAY, progress_bar, say
from hpcrun.run.directory import RunDirectory
from hpcrun.storage.errors import amount

_SHOWN_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_saved(parser)
    parser.add_argument(
        "file", type=Path, help="output: model.safetensors, model.pt, or a new folder with --format"
    )
    parser.add_argument(
        "--format",
        choices=("dcp", "safetensors", "pt"),
        help="dcp: a folder for torch.distributed.checkpoint; safetensors: a file, or a folder of shards; "
        "pt: a file (default: the suffix)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="export this step (default: the newest valid checkpoint)"
    )
    which.add_argument(
        "--best", action="store_true", help="export the checkpoint with the lowest validation loss"
    )
    parser.add_argument(
        "--ema", action="store_true", help="export the averaged weights of train.ema"
    )


def run(arguments: argparse.Namespace) -> int:
    """Export the model and print a summary."""
    store, name = find_saved(arguments, "export-0")
    # Importing torch takes a second, so the arguments are checked first.
    from hpcrun.checkpoint.export import best_readable, export_model, newest_readable

    step = arguments.step
    if step is None:
        step = best_readable(store) if arguments.best else newest_readable(store)
    elif step not in (steps := store.steps()):
        there = ", ".join(map(str, reversed(steps[:_SHOWN_STEPS]))) or "none"
        more = f" and {len(steps) - _SHOWN_STEPS} older" if len(steps) > _SHOWN_STEPS else ""
        raise UserError(f"--step {step}: {name} has no such checkpoint; there are {there}{more}")
    store.require_private([step])
    run = RunDirectory(store.root.parent)
    with progress_bar("B", text="export", delay=BAR_DELAY) as bar:
        exported = export_model(
            store,
            step,
            arguments.file,
            kind=arguments.format,
            averaged=arguments.ema,
            beside=_beside(run) if arguments.format == "safetensors" else None,
            progress=bar.move if bar.drawn else None,
        )
    weights = "averaged weights" if arguments.ema else "model"
    say(
        f"hpcrun: {arguments.file}: the {weights} of {name} after step {step}, "
        f"{exported['tensors']} tensors, {amount(exported['bytes'])}"
    )
    return 0


def _beside(run: RunDirectory) -> dict[str, str]:
    """Return the description that transformers needs beside the weights of the language model."""
    if not run.exists():
        return {}
    config = load_resolved(run.config)
    if config.command or options_for(config.task) is None:
        return {}
    try:
        return {FILE: config_json(LanguageModelShape.model_validate(config.model.own))}
    except ValidationError:  # a run of another version
        return {}
