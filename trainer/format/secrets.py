"""Masks keys, tokens and passwords in what is printed, since plans and reports end up in logs and public issues."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"

_SURE = re.compile(
    r"(api|access|private|secret|auth|account|encryption|signing|ssh)[_-]?(key|token)s?$"
    r"|(hf|hub|wandb|github|bearer|refresh)[_-]?token$"
    r"|secret|passw(or)?d$|passphrase|(^|[_-])pwd$|credentials?$",
    re.IGNORECASE,
)
"""Names whose value is a secret."""
_LIKELY = re.compile(r"(^|[_-])(keys?|tokens?|auth)$", re.IGNORECASE)
"""Names whose value is a secret if it looks like one: --pad_token and --sort_key are harmless."""
_LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bwandb_v\d_\w{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\b[0-9a-f]{40}\b"
)
"""Keys with a known format. 40 hex digits are a Weights & Biases key (or a commit hash, which is no loss)."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_PAIR = re.compile(r"(?P<name>[\w.-]+)(?P<sign>\s*[=:]\s*)(?P<value>(?!//)[^\s&;?,'\"}\]]+|\"[^\"]*\"|'[^']*')")


def masked_value(name: str, value: str) -> str:
    """Returns a value as it may be printed: masked if its name or its form says that it is a secret.

    Args:
        name: of the variable, key or flag.
        value: the value.

    Example:
        >>> masked_value("WANDB_API_KEY", "abc"), masked_value("--pad_token", "<pad>")
        ('***', '<pad>')
        >>> masked_value("hub", "hf_" + "a" * 34)
        '***'
    """
    return HIDDEN if value and _is_secret(name, value) else masked_text(value)


def masked_text(text: str) -> str:
    """Masks what looks like a secret in any text: keys of known services, passwords in URLs, `token=…`.

    Example:
        >>> masked_text("https://me:pass@host/data?api_key=abc&n=3")
        'https://***@host/data?api_key=***&n=3'
    """

    def pair(found: re.Match[str]) -> str:
        is_secret = _is_secret(found["name"], found["value"].strip("'\""))
        return f"{found['name']}{found['sign']}{HIDDEN}" if is_secret else found[0]

    return _IN_ADDRESS.sub(HIDDEN, _LOOKS.sub(HIDDEN, _PAIR.sub(pair, text)))


def masked_words(words: Sequence[str]) -> list[str]:
    """Masks the secrets among the words of a command line.

    Example:
        >>> masked_words(["train.py", "--api_key", "abc", "--lr", "0.1", "--password=x"])
        ['train.py', '--api_key', '***', '--lr', '0.1', '--password=***']
    """
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        flag = before.lstrip("-") if before.startswith("-") and "=" not in before else ""
        shown.append(word if word.startswith("-") and "=" not in word else masked_value(flag, word))
    return shown


def _is_secret(name: str, value: str) -> bool:
    """Returns True if the name says that the value is a secret; for some names it must look like one too."""
    name = name.rsplit(".", 1)[-1]
    # Neither a number nor a word.
    is_key = len(value) >= 8 and any(letter.isdigit() for letter in value) and not value.replace(".", "").isdigit()
    return bool(_SURE.search(name) or (_LIKELY.search(name) and is_key))
