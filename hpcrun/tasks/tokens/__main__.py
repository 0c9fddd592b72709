"""``python -m hpcrun.tasks.tokens``: tokenize text into shards, or verify shards."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.printing import say, say_aside
from hpcrun.tasks.tokens.shards import has_split, open_source
from hpcrun.tasks.tokens.writing import documents, drawn, open_tokenizer, tokenized, write_folder

REFUSED, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.verify:
            _verify(options.folder)
        else:
            _write(options)
    except UserError as error:
        say_aside(*error.lines)
        return REFUSED
    except KeyboardInterrupt:
        say_aside("interrupted: nothing was written")
        return INTERRUPTED
    return 0


def _write(options: argparse.Namespace) -> None:
    if not options.input:
        raise UserError(f"{options.folder}: no input; name text files after the folder")
    if not 0 <= options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction: should be from 0 to below 1, not {options.validation_fraction:g}"
        )
    if options.shard_tokens < 1:
        raise UserError(f"--shard-tokens: should be at least 1, not {options.shard_tokens}")
    tokenizer = open_tokenizer(options.tokenizer, options.end_token)
    found = tokenized(documents(options.input, options.field), tokenizer)
    made = write_folder(
        options.folder,
        found,
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.name,
        end_token=tokenizer.end_token,
        shard_tokens=options.shard_tokens,
        validation=drawn(options.validation_fraction),
    )
    for split, shards in made["splits"].items():
        tokens, texts = (sum(one[key] for one in shards) for key in ("tokens", "documents"))
        say(
            f"{options.folder}: {split}: {tokens} tokens of {texts} documents, {len(shards)} shards"
        )


def _verify(folder: Path) -> None:
    for split in ("train", "validation"):
        if split == "train" or has_split(folder, split):
            for shard in open_source(folder, split, "uint16").shards:
                shard.check(hashes=True)
    say(f"{folder}: all shards are valid")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpcrun.tasks.tokens",
        description="Tokenize text files into a folder of token shards.",
        epilog="A .jsonl file has a document in each line; any other file is a document.",
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="new folder of shards")
    add("input", type=Path, nargs="*", metavar="FILE", help="text or .jsonl, also .gz")
    add(
        "--tokenizer",
        default="bytes",
        metavar="FILE",
        help="bytes (default), or a tokenizer.json of Hugging Face",
    )
    add("--end-token", metavar="TOKEN", help="token after each document: <|endoftext|>")
    add("--field", default="text", metavar="NAME", help="field of JSON lines (text)")
    add(
        "--validation-fraction",
        type=float,
        default=0.0,
        metavar="F",
        help="fraction of the documents to hold out for validation (0)",
    )
    add(
        "--shard-tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="tokens of a shard, about (100000000)",
    )
    add("--verify", action="store_true", help="check the hashes of FOLDER, and write nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
