"""The words of a shell line: enough of the shell's grammar to find assignments."""

from collections.abc import Iterator
from dataclasses import dataclass, field

_SEPARATORS = ";&|()"


@dataclass
class Word:
    """One word without its quotes. ``expands``: it contains a ``$`` or a backquote outside single quotes."""

    text: str = ""
    expands: bool = False
    begun: bool = False
    pieces: list[str] = field(default_factory=list)

    def add(self, character: str) -> None:
        """Append a character."""
        self.pieces.append(character)
        self.begun = True

    def finish(self) -> "Word":
        """Return the word with its text joined."""
        self.text = "".join(self.pieces)
        return self


def shell_words(line: str) -> Iterator[Word]:
    """Yield the words of ``line``, each of ``; & | ( )`` as a separate word, without a comment.

    A quote that the line does not close ends with the line. ``$(…)`` and backquotes stay one word.
    """
    word, position = Word(), 0
    while position < len(line):
        character = line[position]
        if character in "'\"":
            position = _quoted(line, position, word)
            continue
        if character == "\\" and position + 1 < len(line):
            word.add(line[position + 1])
            position += 2
            continue
        if character == "`" or line.startswith(("$(", "${"), position):
            position = _substitution(line, position, word)
            continue
        if character == "#" and not word.begun:
            break
        if character.isspace() or character in _SEPARATORS:
            if word.begun:
                yield word.finish()
                word = Word()
            if character in _SEPARATORS:
                yield Word(text=character)
        else:
            word.expands |= character == "$"
            word.add(character)
        position += 1
    if word.begun:
        yield word.finish()


def _quoted(line: str, start: int, word: Word) -> int:
    """Add the text in quotes to ``word``; return the position after the closing quote."""
    quote, position = line[start], start + 1
    word.begun = True
    while position < len(line) and line[position] != quote:
        if quote == '"' and line[position] == "\\" and position + 1 < len(line):
            position += 1
        elif quote == '"' and line.startswith(("$(", "${", "`"), position):
            position = _substitution(line, position, word)
            continue
        elif quote == '"' and line[position] == "$":
            word.expands = True
        word.add(line[position])
        position += 1
    return position + 1


def _substitution(line: str, start: int, word: Word) -> int:
    """Add ``$(…)``, ``${…}`` or a backquoted command whole; return the position after it."""
    word.expands = True
    if line[start] == "`":
        end = line.find("`", start + 1)
        end = len(line) if end < 0 else end + 1
    else:
        opening, closing = line[start + 1], ")" if line[start + 1] == "(" else "}"
        depth, end = 1, start + 2
        while end < len(line) and depth:
            depth += (line[end] == opening) - (line[end] == closing)
            end += 1
    for character in line[start:end]:
        word.add(character)
    return end
