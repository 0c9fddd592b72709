"""Read documents from text files and from files of JSON lines, also compressed with gzip."""

import gzip
import json
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from hpcrun.tasks.tokens.shards import TokenError
from hpcrun.tasks.tokens.tokenizers import Tokenizer

_LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")
_AT_ONCE = 1000


def documents(paths: list[Path], field: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document.

    A file of JSON lines (``.jsonl``, ``.ndjson``, ``.json.gz``) has a document in ``field`` of each line. Any
    other file is one document. Names do not contain the folder.

    Raises:
        TokenError: a file cannot be read, is not UTF-8, or a line lacks the field.
    """
    for path in paths:
        try:
            with _open(path) as file:
                if not path.name.endswith(_LINES):
                    yield path.name, file.read()
                    continue
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path.name}:{number}", _field(path, number, line, field)
        except (OSError, EOFError, zlib.error) as error:
            text = getattr(error, "strerror", None) or str(error)
            raise TokenError(f"{path}: cannot be read: {text}") from error
        except UnicodeDecodeError as error:
            raise TokenError(f"{path}: is not UTF-8 at byte {error.start}; convert it") from error


def tokenized(
    found: Iterator[tuple[str, str]], tokenizer: Tokenizer
) -> Iterator[tuple[str, list[int]]]:
    """Yield the name and the tokens of each document; a thousand documents at a time use all cores."""
    while some := list(islice(found, _AT_ONCE)):
        encoded = tokenizer.encode([text for _, text in some])
        for (name, _), tokens in zip(some, encoded, strict=True):
            yield name, list(tokens)


def _open(path: Path) -> IO[str]:
    # newline="": a text keeps its own ends of lines.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _field(path: Path, number: int, line: str, field: str) -> str:
    try:
        found = json.loads(line)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise TokenError(
            f"{path}:{number}: has no {field} in a JSON object; name the field with --field"
        ) from error
    if not isinstance(found, str):
        raise TokenError(f"{path}:{number}: {field} is not text; name another field with --field")
    try:
        found.encode()
    except UnicodeEncodeError as error:
        raise TokenError(
            f"{path}:{number}: {field} has half of a surrogate pair at character {error.start}; remove it"
        ) from error
    return found
