"""Values of the config that a screen, a log or a shared file must not show.

They are the URL of a webhook and the values of ``job.env``, which may be tokens.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

MASK = "***"
_URL = re.compile(r"https?://[^\s'\"|;<>]*[^\s'\"|;<>:,.)]", re.IGNORECASE)
_OVERRIDE = re.compile(r"((?:--)?(?:watch\.)?notify=)(.*)", re.DOTALL)
_ENV = re.compile(r"(\s*(?:job\s*(?:\.\s*env\s*(?:\.[^=]*)?)?|watch)\s*=).*", re.DOTALL)


def masked(text: str) -> str:
    """Return ``text`` with every URL cut down to its host: ``https://hooks.slack.com/***``.

    Anyone who knows the URL of a webhook can write to its channel. A user name and password are also
    removed.
    """
    if text.lower().startswith(("http://", "https://")) and " " not in text.strip():
        return _host(text)
    return _URL.sub(lambda found: _host(found[0]), text)


def _host(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return f"{url.partition(':')[0]}://{MASK}"
    return f"{parts.scheme}://{host}{port}/{MASK}"


def masked_words(words: list[str]) -> list[str]:
    """Return the ``words`` of a command line with the values of `watch.notify=` and `job.env.X=` masked.

    The text of a program (``python -c``) is masked too: it may call ``hpcrun.submit`` with such values.
    """
    shown = [
        MASK if before == "-c" and "(" in word else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    return [
        f"{env[1]}{MASK}"
        if (env := _ENV.fullmatch(word))
        else _OVERRIDE.sub(lambda found: found[1] + masked(found[2]), word)
        for word in shown
    ]


def masked_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the ``values`` of ``Config.model_dump()`` with ``watch.notify`` and ``job.env`` masked."""
    watch, job = values.get("watch"), values.get("job")
    if isinstance(watch, dict) and isinstance(watch.get("notify"), str):
        values = {**values, "watch": {**watch, "notify": masked(watch["notify"])}}
    if isinstance(job, dict) and job.get("env"):
        env = job["env"]
        shown = dict.fromkeys(env, MASK) if isinstance(env, dict) else MASK
        values = {**values, "job": {**job, "env": shown}}
    return values
