"""Masks keys, tokens and passwords in printed text, because plans and reports end up in logs and public issues."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(api|access|private|secret|auth|account|encryption|signing|ssh)[_-]?(key|token)s?$"
    r"|(hf|hub|wandb|github|bearer|refresh)[_-]?token$"
    r"|secret|passw(or)?d$|passphrase|(^|[_-])pwd$|credentials?$",
    re.IGNORECASE,
)
"""Names whose value is always a secret."""
_AMBIGUOUS_NAME = re.compile(r"(^|[_-])(keys?|tokens?|auth)$", re.IGNORECASE)
"""Names whose value is a secret only if it looks like one: --pad_token and --sort_key are harmless."""
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[\w-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bxox[abprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}|\bwandb_v\d_\w{20,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|\b[0-9a-f]{40}\b"
)
"""Keys of known services. 40 hex digits are a Weights & Biases key, or a commit hash, which may be masked too."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_WORD = re.compile(r"[\w.-]*\w")
_SEPARATOR = re.compile(r"[\"'\])\s\\]*(?P<sign>==?|[:,(])\s*")
"""The separator between a name and its value in a file: `=`, `: `, `"] = `, `", `, `(`."""
_QUOTED = re.compile(r"(?P<quote>[\"'])(?P<value>.*?)(?P<end>(?P=quote)|$)")
_VARIABLE = re.compile(r"[A-Z]+(_[A-Z]+)+")
_PAIR = re.compile(r"(?P<name>[\w.-]+)(?P<sign>\s*[=:]\s*)(?P<value>(?!//)[^\s&;?,'\"}\]]+|\"[^\"]*\"|'[^']*')")


def masked_value(name: str, value: str) -> str:
    """Returns a value that is safe to print: masked if its name or its format marks it as a secret.

    Args:
        name: the name of the variable, key or flag.
        value: the value.

    Example:
        >>> masked_value("WANDB_API_KEY", "abc"), masked_value("--pad_token", "<pad>")
        ('***', '<pad>')
        >>> masked_value("hub", "hf_" + "a" * 34)
        '***'
    """
    return HIDDEN if value and _is_secret(name, value) else masked_text(value)


def masked_text(text: str) -> str:
    """Masks everything in a text that looks like a secret: keys of known services, passwords in URLs, `token=…`.

    Example:
        >>> masked_text("https://me:pass@host/data?api_key=abc&n=3")
        'https://***@host/data?api_key=***&n=3'
    """

    def masked_pair(pair: re.Match[str]) -> str:
        is_secret = _is_secret(pair["name"], pair["value"].strip("'\""))
        return f"{pair['name']}{pair['sign']}{HIDDEN}" if is_secret else pair[0]

    return _IN_ADDRESS.sub(HIDDEN, _SECRET_VALUE.sub(HIDDEN, _PAIR.sub(masked_pair, text)))


def masked_words(words: Sequence[str]) -> list[str]:
    """Masks the secrets in a command line.

    Example:
        >>> masked_words(["train.py", "--api_key", "abc", "--lr", "0.1", "--password=x"])
        ['train.py', '--api_key', '***', '--lr', '0.1', '--password=***']
    """
    shown = []
    for previous, word in zip(["", *words], words, strict=False):
        flag = previous.lstrip("-") if previous.startswith("-") and "=" not in previous else ""
        shown.append(word if word.startswith("-") and "=" not in word else masked_value(flag, word))
    return shown


def masked_lines(lines: Sequence[str], quoted: bool) -> list[str]:
    """Masks the secrets in a file's lines, including values that continue on the next line.

    Args:
        lines: the file's lines.
        quoted: True for code, in which only quoted text can be a secret.

    Example:
        >>> masked_lines(['os.environ["API_KEY"] = "abc"', "api_key = read(path)"], quoted=True)
        ['os.environ["API_KEY"] = "***"', 'api_key = read(path)']
        >>> masked_lines(["password: abc", "sort_key: size"], quoted=False)
        ['password: ***', 'sort_key: size']
    """
    shown, is_continuation = [], False
    for line in lines:
        start = 0 if is_continuation else _start_of_secret(line, quoted)
        is_continuation = not is_continuation and start is not None and _continues(line[start:], quoted)
        if start is not None:
            line = line[:start] + _masked_secret(line[start:], quoted)
        shown.append(_IN_ADDRESS.sub(HIDDEN, _SECRET_VALUE.sub(HIDDEN, line)))
    return shown


def _start_of_secret(line: str, quoted: bool) -> int | None:
    """Returns the index at which the first secret value in a line begins, or None if there is none."""
    for name in _WORD.finditer(line):
        separator = _SEPARATOR.match(line, name.end())
        if separator is None:
            continue
        rest = line[separator.end() :]
        values = [found["value"] for found in _QUOTED.finditer(rest)] if quoted else [rest.strip().strip("\"',")]
        if any(_is_secret(name[0], value) for value in values if value and not _VARIABLE.fullmatch(value)):
            return separator.end()
        if separator["sign"] in "=:" and _continues(rest, quoted) and _is_secret(name[0], ""):
            return separator.end()
    return None


def _continues(value: str, quoted: bool) -> bool:
    """Returns True if a value continues on the next line."""
    return value.rstrip().endswith(("(", "\\", '"""', "'''") if quoted else ("|", ">", "\\"))


def _masked_secret(value: str, quoted: bool) -> str:
    """Masks a secret value, or in code the strings in it."""
    if not quoted:
        return HIDDEN
    if not _QUOTED.search(value):
        return value if _continues(value, quoted) else HIDDEN

    def masked_string(string: re.Match[str]) -> str:
        is_harmless = not string["value"] or _VARIABLE.fullmatch(string["value"])
        return string[0] if is_harmless else f"{string['quote']}{HIDDEN}{string['end']}"

    return _QUOTED.sub(masked_string, value)


def _is_secret(name: str, value: str) -> bool:
    """Returns True if the name marks its value as a secret. For an ambiguous name, the value must look like a key."""
    name = name.rsplit(".", 1)[-1]
    # A key is neither a number nor a word.
    is_key = len(value) >= 8 and any(letter.isdigit() for letter in value) and not value.replace(".", "").isdigit()
    return bool(_SECRET_NAME.search(name) or (_AMBIGUOUS_NAME.search(name) and is_key))
