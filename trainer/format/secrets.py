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
_WORD = re.compile(r"[\w.-]*\w")
_SIGN = re.compile(r"[\"'\])\s\\]*(?P<sign>==?|[:,(])\s*")
"""What stands between a name and its value in a file: `=`, `: `, `"] = `, `", `, `(`."""
_QUOTED = re.compile(r"(?P<quote>[\"'])(?P<value>.*?)(?P<end>(?P=quote)|$)")
_VARIABLE = re.compile(r"[A-Z]+(_[A-Z]+)+")
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


def masked_lines(lines: Sequence[str], quoted: bool) -> list[str]:
    """Masks the secrets in lines of a file, among them values that follow in the next line.

    Args:
        lines: of the file.
        quoted: True for code, in which only what stands in quotes can be a secret.

    Example:
        >>> masked_lines(['os.environ["API_KEY"] = "abc"', "api_key = read(path)"], quoted=True)
        ['os.environ["API_KEY"] = "***"', 'api_key = read(path)']
        >>> masked_lines(["password: abc", "sort_key: size"], quoted=False)
        ['password: ***', 'sort_key: size']
    """
    shown, is_value = [], False
    for line in lines:
        start = 0 if is_value else _start_of_secret(line, quoted)
        is_value = not is_value and start is not None and _goes_on(line[start:], quoted)
        if start is not None:
            line = line[:start] + _hidden(line[start:], quoted)
        shown.append(_IN_ADDRESS.sub(HIDDEN, _LOOKS.sub(HIDDEN, line)))
    return shown


def _start_of_secret(line: str, quoted: bool) -> int | None:
    """Where the value of the first secret name in a line begins; None without one."""
    for name in _WORD.finditer(line):
        sign = _SIGN.match(line, name.end())
        if sign is None:
            continue
        rest = line[sign.end() :]
        values = [found["value"] for found in _QUOTED.finditer(rest)] if quoted else [rest.strip().strip("\"',")]
        if any(_is_secret(name[0], value) for value in values if value and not _VARIABLE.fullmatch(value)):
            return sign.end()
        if sign["sign"] in "=:" and _goes_on(rest, quoted) and _is_secret(name[0], ""):
            return sign.end()
    return None


def _goes_on(value: str, quoted: bool) -> bool:
    """True if a value goes on in the next line."""
    return value.rstrip().endswith(("(", "\\", '"""', "'''") if quoted else ("|", ">", "\\"))


def _hidden(value: str, quoted: bool) -> str:
    if not quoted or not _QUOTED.search(value):
        return value if quoted and _goes_on(value, quoted) else HIDDEN

    def literal(found: re.Match[str]) -> str:
        is_harmless = not found["value"] or _VARIABLE.fullmatch(found["value"])
        return found[0] if is_harmless else f"{found['quote']}{HIDDEN}{found['end']}"

    return _QUOTED.sub(literal, value)


def _is_secret(name: str, value: str) -> bool:
    """Returns True if the name says that the value is a secret; for some names it must look like one too."""
    name = name.rsplit(".", 1)[-1]
    # Neither a number nor a word.
    is_key = len(value) >= 8 and any(letter.isdigit() for letter in value) and not value.replace(".", "").isdigit()
    return bool(_SURE.search(name) or (_LIKELY.search(name) and is_key))
