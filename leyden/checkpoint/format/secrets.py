"""The rules for what looks like a secret, and the masking of secrets in commands, diffs, hyperparameters and reports.

A value is a secret if its name says so (`api_key`), if its name allows it and the value looks random (`key`, `token`),
or if it has the format of a known service's keys. The formats are those of the detectors of detect-secrets
(https://github.com/Yelp/detect-secrets), and of services for machine learning; nothing depends on that package, so that
two computers mask the same values. A random value whose name says nothing stays: commits and digests look like keys.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import enum
import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from leyden.checkpoint.format.configs import config_of, is_config, resolved

HIDDEN = "***"
MASKED = "***masked***"
"""The mask in values that a program may read back, which must never be taken for the value itself."""
DIGEST = "$secret"
"""The key under which JSON that is only compared has a secret's digest."""
OWNERS = 0o600
"""The mode of a file that may hold a secret."""

# names ----------------------------------------------------------------------------------------------------------------
_SECRET_NAME = re.compile(
    r"(api|access|account|auth|encryption|private|secret|signing|ssh)_?(key|token)s?$"
    r"|(^|_)((hf|hub|wandb|github|gitlab|bearer|refresh|session|sas)_?token|(wandb|license)_?key)s?$"
    r"|secrets?(_(id|value))?$|pass_?(word|wd|phrase|code)s?$|(^|_)(pwd|creds?|jwt|authorization|cookies?)$"
    r"|credentials?$|^pass$|(^|_)(admin|app|database|db|http|ftp|mysql|pg|redis|root|smtp|sudo|user)_?pass$"
)
"""Names whose value is a secret, in lower case with underscores."""
_AMBIGUOUS_NAME = re.compile(r"(^|_)(keys?|tokens?|auth|bearer|login|sig|signature|wandb|webhook)$")
"""Names whose value is a secret only if it looks random: --pad_token and --sort_key are harmless."""
_HARMLESS = re.compile(
    r"(?i:|true|false|none|null|yes|no|auto|default|\d{1,3}|<[^<>]*>|(bearer|basic|token)? ?(\{[^{}]*\}|%s)?)"
    r"|[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|\?\?\?|\$([A-Z_][A-Z0-9_]*|\{.*\}|\(.*\))|\*\*\*(masked\*\*\*)?"
    r"|[\w~.@/\\:-]*\.(json|ya?ml|toml|ini|cfg|conf|txt|pem|key|crt|p12|env|csv)|(~|\.{1,2})?(/[A-Za-z_.-]+){2,}"
)
"""Values that are no secret under any name: flags, variables, placeholders and files."""

# values ---------------------------------------------------------------------------------------------------------------
_FORMATS = re.compile(
    r"\bAKC[a-zA-Z0-9]{20,}|\bAP[0-9A-F][a-zA-Z0-9]{30,}"  # Artifactory
    r"|\b(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}\b"  # AWSKey
    r"|\b[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}"  # DiscordBotToken
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"  # GitHubToken
    r"|\b(?:gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-|GR1348941)[\w-]{16,}"  # GitLabToken
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.?[\w.-]*"  # JwtToken
    r"|\b[0-9a-z]{32}-us\d{1,2}\b"  # Mailchimp
    r"|\bnpm_[A-Za-z0-9]{30,}|(?<=:_authToken=)\S+"  # Npm
    r"|\bsk-(?=[\w-]*\d)[\w-]*?[A-Za-z0-9]{16}[\w-]*"  # OpenAI, Anthropic
    r"|\bpypi-AgE[\w-]{20,}"  # PypiToken
    r"|-----BEGIN[A-Z ]* PRIVATE KEY-----[\s\S]*?(?:-----END[A-Z ]* PRIVATE KEY-----|\Z)"  # PrivateKey
    r"|\bSG\.[\w-]{16,}\.[\w-]{16,}"  # SendGrid
    r"|\bxox[abeoprs]-[\w-]{10,}|(?<=hooks\.slack\.com/)(?:services|workflows)/[\w/]+"  # Slack
    r"|(?<=api\.softlayer\.com/soap/v3/)[a-z0-9]{64}"  # Softlayer
    r"|\bsq0[a-z]{3}-[\w\\-]{22,}"  # SquareOAuth
    r"|\b[rs]k_(?:live|test)_[0-9a-zA-Z]{16,}"  # Stripe
    r"|\b\d{8,10}:[\w-]{35}(?![\w-])"  # TelegramBotToken
    r"|\b(?:AC|SK)[0-9a-f]{32}\b"  # Twilio
    r"|\bhf_[A-Za-z0-9]{16,}|\bwandb_v\d_\w{20,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{20,}|\bnvapi-[\w-]{20,}"
    r"|\bgsk_[A-Za-z0-9]{20,}|\br8_[A-Za-z0-9]{30,}|\bdop_v1_[0-9a-f]{64}|\bdckr_pat_[\w-]{20,}|\bhvs\.[\w-]{20,}"
    r"|(?<=discord\.com/api/webhooks/)\d+/[\w-]+"
)
"""Keys of known services, each after the name of its detector in detect-secrets, if there is one."""
_IN_ADDRESS = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_USER = re.compile(r"[a-z][a-z_-]{0,15}")
"""A user's name in an address, which is no password: `ssh://git@host`."""
_IN_QUERY = re.compile(
    r"(?i)(?<=[?&])(?P<name>(?:x-(?:amz|goog)-)?(?:signature|security-token|credential)|sig"
    r"|awsaccesskeyid|googleaccessid|hmac)=[^&\s\"'#]+"
)
"""The parts of a signed URL that let anybody use it, of S3, Google Cloud Storage, Azure and CloudFront."""
_HEADER = re.compile(
    r"(?i)(?P<head>\b(?:proxy-)?(?:authorization\\?[\"']?\s*[:=]|(?:set-)?cookie:)\s*)(?P<value>[^\"'\n]+)"
)
_ONE_HEADER = re.compile(r"[\w-]+: *\S+")
_SCHEME = re.compile(r"\b(?P<scheme>Bearer|Basic) +(?=[\w.~+/-]*[\d=])[\w.~+/-]{8,}=*", re.IGNORECASE)
_NAME = re.compile(r"(?P<name>[\w.-]+)(?:(?P<sign>(?:\\?[\"'])?\]?\s*(?:==?|:)\s*)|\s+)")
_VALUE = re.compile(r"(?!//)(?:(?P<quote>\\?[\"'])(?P<inner>.*?)(?P=quote)|[^\s&;?,'\"}\]\\]+)")
_WORD_PAIR = re.compile(r"(?P<name>[\w.+-]+)=(?P<value>[^\"'].*)", re.DOTALL)
_LOGIN = re.compile(r"(?P<user>[^\s:/\\]+):(?![/\\])(?!\d+$)[^\s'\"]+")
_LOGIN_FLAGS = ("u", "U", "user", "proxy-user")
_LOGIN_IN_TEXT = re.compile(rf"(?P<flag>(?:^|(?<=\s))(?:-[uU] ?|--(?:proxy-)?user[ =])['\"]?){_LOGIN.pattern}")
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")

# lines of a file ------------------------------------------------------------------------------------------------------
_WORD = re.compile(r"[\w.-]*\w")
_SEPARATOR = re.compile(r"[\"'\])\s\\]*(?P<sign>==?|[:,(])\s*")
"""The separator between a name and its value in a file: `=`, `: `, `"] = `, `", `, `(`."""
_QUOTED = re.compile(r"(?P<quote>[\"'])(?P<value>.*?)(?P<end>(?P=quote)|$)")


def masked_value(name: str, value: str) -> str:
    """Returns a value that is safe to print: masked if its name or its format marks it as a secret.

    Example:
        >>> masked_value("WANDB_API_KEY", "abc"), masked_value("--pad_token", "<pad>")
        ('***', '<pad>')
        >>> masked_value("hub", "hf_" + "a" * 34)
        '***'
    """
    if is_secret(name, value):
        return HIDDEN
    login = _LOGIN.fullmatch(value) if name.lstrip("-") in _LOGIN_FLAGS else None
    return masked_text(value) if login is None else f"{login['user']}:{HIDDEN}"


def masked_text(text: str) -> str:
    """Masks everything in a text that looks like a secret: keys of known services, passwords in URLs, `token=…`.

    Example:
        >>> masked_text("https://me:pass@host/data?api_key=abc&n=3")
        'https://***@host/data?api_key=***&n=3'
        >>> masked_text('{"api_key": "abc"}'), masked_text("Authorization: Bearer abc")
        ('{"api_key": "***"}', 'Authorization: ***')
    """
    if text.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError, RecursionError):
            values = json.loads(text)
            masked = masked_values(values, mask=lambda _, shown: shown)
            return text if masked is values else json.dumps(masked, ensure_ascii=False)

    text = _LOGIN_IN_TEXT.sub(rf"\g<flag>\g<user>:{HIDDEN}", _masked_formats(text))
    shown, begin = [], 0
    for found in _NAME.finditer(text):
        value = _VALUE.match(text, found.end()) if found.start() >= begin else None
        # Without a sign, only a flag has a value: "--api_key abc" within a shell's command.
        if value is None or not (found["sign"] or found["name"].startswith("--")):
            continue
        inner = value[0] if value["quote"] is None else value["inner"]
        if is_secret(found["name"], inner) and (found["sign"] or not inner.startswith("-")):
            mark = value["quote"] or ""
            shown.append(f"{text[begin : value.start()]}{mark}{HIDDEN}{mark}")
            begin = value.end()
    return "".join(shown) + text[begin:]


def masked_words(words: Sequence[str]) -> list[str]:
    """Masks the secrets in a command line.

    Example:
        >>> masked_words(["train.py", "--api_key", "-abc", "--lr", "0.1", "--password=x"])
        ['train.py', '--api_key', '***', '--lr', '0.1', '--password=***']
        >>> masked_words(["curl", "-u", "me:pass", "-H", "Authorization: Bearer abc"])
        ['curl', '-u', 'me:***', '-H', 'Authorization: ***']
    """
    shown = []
    for previous, word in zip(["", *words], words, strict=False):
        # wandb login KEY
        name = previous if _FLAG.fullmatch(previous) or previous == "login" else ""
        is_flag = _FLAG.fullmatch(word) is not None
        if is_flag and not word.startswith("--") and len(word) > 2:
            # A value may begin with "-": it follows a flag that needs one.
            is_flag = not _has_secret_name(name)
        elif is_flag:
            is_flag = not (_has_secret_name(name) and _is_random(word))
        pair = None if name and not is_flag and _has_secret_name(name) else _WORD_PAIR.fullmatch(word)
        if is_flag:
            shown.append(word)
        elif pair is not None and (hidden := masked_value(pair["name"], pair["value"])) != pair["value"]:
            shown.append(f"{pair['name']}={hidden}")
        else:
            shown.append(masked_value(name.lstrip("-"), word))
    return shown


def masked_lines(lines: Sequence[str], quoted: bool) -> list[str]:
    """Masks the secrets in a file's lines, including values that continue on the next line.

    `quoted` is True for code, in which only quoted text can be a secret.

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
        if quoted:
            line = _QUOTED.sub(lambda text: f"{text['quote']}{masked_text(text['value'])}{text['end']}", line)
        shown.append(_masked_keys(line) if quoted else _masked_formats(line))
    return shown


def masked_values(values: Any, name: str = "", mask: Callable[[str, str], Any] | None = None) -> Any:
    """Masks the secrets in hyperparameters or a configuration: a nest of mappings, lists, Namespaces and dataclasses.

    Files of keys, names of environment variables, bools and numbers stay.

    Args:
        values: the nest.
        name: its name.
        mask: returns what takes a secret's place, given the text and its printable form. By default it is that form
            with `MASKED`, by which `masked_names` finds it.

    Returns:
        The object itself if there is nothing to mask, and otherwise a copy.

    Example:
        >>> masked_values({"api_key": "abc", "urls": ["s3://me:abc@host"], "num_tokens": 3})
        {'api_key': '***masked***', 'urls': ['s3://***masked***@host'], 'num_tokens': 3}
    """
    if isinstance(values, (str, bytes)):
        return _masked_leaf(values, name, mask)
    if is_config(values):
        plain = resolved(values, name or "hparams")
        masked = masked_values(plain, name, mask)
        return values if masked is plain else config_of(masked)
    entries = _entries(values)
    if entries is None or (isinstance(values, dict) and DIGEST in values):
        return values
    inherited = name if _has_secret_name(name) else ""
    found = [masked_values(item, inherited or str(key), mask) for key, item in entries]
    if all(new is old for new, (_, old) in zip(found, entries, strict=True)):
        return values
    return _rebuilt(values, [(key, new) for new, (key, _) in zip(found, entries, strict=True)])


def masked_names(values: Any, name: str = "") -> Iterator[str]:
    """Yields the dotted names of values that `masked_values` has masked.

    Example:
        >>> list(masked_names({"lr": 0.1, "parts": [{"api_key": MASKED}]}))
        ['parts[0].api_key']
    """
    if isinstance(values, str):
        if MASKED in values:
            yield name
        return
    for key, item in _entries(values) or ():
        is_index = isinstance(values, (list, tuple, set, frozenset)) and isinstance(key, int)
        yield from masked_names(item, f"{name}[{key}]" if is_index else f"{name}.{key}" if name else str(key))


def is_marked(text: str) -> bool:
    """Returns True for a file's text in which something was masked: more may be left, so only its owner may read it."""
    return HIDDEN in text or f'"{DIGEST}"' in text


@functools.lru_cache(maxsize=64)
def digest_of(secret: str) -> str:
    """Returns a short digest, which tells whether two secrets are equal, but not what they are.

    32 bits leave many candidates for whoever tries a dictionary, and each try takes milliseconds.
    """
    return hashlib.pbkdf2_hmac("sha256", secret.encode(), b"leyden", 20_000, dklen=4).hex()


def is_secret(name: str, value: str) -> bool:
    """Returns True if a name marks its value as a secret. For an ambiguous name, the value must look random.

    Example:
        >>> is_secret("api_key", "abc"), is_secret("sort_key", "size"), is_secret("sort_key", "q7Vd0ZtB2mKx8LsP4f")
        (True, False, True)
    """
    if not value or _HARMLESS.fullmatch(value):
        return False
    name = _name_of(name)
    if _SECRET_NAME.search(name):
        return True
    if not _AMBIGUOUS_NAME.search(name):
        return False
    is_short_key = name in ("key", "token", "auth") and value.isalnum() and len(value) >= 8 and _changes(value) >= 3
    return is_short_key or _is_random(value)


def _has_secret_name(name: str) -> bool:
    return bool(_SECRET_NAME.search(_name_of(name)))


def _name_of(name: str) -> str:
    """Returns the last part of a name in lower case with underscores: `aws.secretKey` is `secret_key`."""
    last = name.rsplit(".", 1)[-1].strip("-_").replace("-", "_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", last).lower()


def _is_random(text: str) -> bool:
    """Returns True for a text with a stretch of letters and digits that no word, number or version has."""
    stretch = max(re.findall(r"[A-Za-z0-9]+", text), key=len, default="")
    counts = Counter(stretch).values()
    entropy = -sum(count / len(stretch) * math.log2(count / len(stretch)) for count in counts)
    # "resnet50imagenet1k" changes 4 times between letters and digits; a random text of that length about 8 times.
    return len(stretch) >= 16 and entropy >= 3 and _changes(stretch) >= len(stretch) / 4


def _changes(text: str) -> int:
    """Returns how often a text changes between lower case, upper case and digits."""
    kinds = [letter.isdigit() + 2 * letter.isupper() for letter in text]
    return sum(one != other for one, other in itertools.pairwise(kinds))


def _masked_formats(text: str) -> str:
    """Masks what needs no name: keys of known services, headers, and passwords and signatures in URLs."""

    def masked_header(found: re.Match[str]) -> str:
        return found[0] if _HARMLESS.fullmatch(found["value"].strip()) else f"{found['head']}{HIDDEN}"

    text = _HEADER.sub(masked_header, text)
    return _masked_keys(_SCHEME.sub(rf"\g<scheme> {HIDDEN}", text))


def _masked_keys(text: str) -> str:
    """Masks keys of known services, and passwords and signatures in URLs."""

    def masked_address(found: re.Match[str]) -> str:
        return found[0] if _USER.fullmatch(found[0]) else HIDDEN

    text = _IN_QUERY.sub(rf"\g<name>={HIDDEN}", text)
    return _IN_ADDRESS.sub(masked_address, _FORMATS.sub(HIDDEN, text))


def _masked_leaf(value: Any, name: str, mask: Callable[[str, str], Any] | None) -> Any:
    if isinstance(value, enum.Enum):
        return value
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value).replace(MASKED, HIDDEN)
    # A prompt is text about anything: only a value in one piece is searched for `name=value`.
    is_whole = not re.search(r"\s", text) or text.lstrip()[:1] in ("{", "[") or _ONE_HEADER.fullmatch(text)
    if is_secret(name, text):
        shown = HIDDEN
    else:
        shown = masked_value(name, text) if is_whole else _masked_formats(text)
    if shown == text or (isinstance(value, bytes) and shown != HIDDEN):
        return value
    return shown.replace(HIDDEN, MASKED) if mask is None else mask(text, shown)


def _entries(values: Any) -> list[tuple[Any, Any]] | None:
    """Returns the entries of a container with their keys; None for anything else."""
    if is_config(values):
        values = resolved(values)
    if isinstance(values, Mapping):
        return list(values.items())
    if isinstance(values, (list, tuple, set, frozenset)):
        names = getattr(values, "_fields", None)
        return list(enumerate(values) if names is None else zip(names, values, strict=True))
    if isinstance(values, argparse.Namespace):
        return list(vars(values).items())
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        return [(field.name, getattr(values, field.name, None)) for field in dataclasses.fields(values)]
    return None


def _rebuilt(values: Any, entries: list[tuple[Any, Any]]) -> Any:
    """Returns a copy of a container with other values."""
    if isinstance(values, tuple) and hasattr(values, "_make"):
        return values._make(item for _, item in entries)
    if isinstance(values, (list, tuple, set, frozenset)):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(values, kind))
        return kind(item for _, item in entries)
    if isinstance(values, Mapping) and not isinstance(values, dict):
        return dict(entries)
    changed = copy.copy(values)
    for key, item in entries:
        if isinstance(changed, dict):
            changed[key] = item
        else:
            object.__setattr__(changed, key, item)
    return changed


def _start_of_secret(line: str, quoted: bool) -> int | None:
    """Returns the index at which the first secret value in a line begins, or None if there is none."""
    strings = [found.span() for found in _QUOTED.finditer(line) if found["end"]] if quoted else []
    for name in _WORD.finditer(line):
        separator = _SEPARATOR.match(line, name.end())
        # A pair within a string, such as a URL, is left to `masked_text`.
        if separator is None or any(begin < name.start() and separator.end() < end for begin, end in strings):
            continue
        rest = line[separator.end() :]
        values = [found["value"] for found in _QUOTED.finditer(rest)] if quoted else [rest.strip().strip("\"',")]
        if any(is_secret(name[0], value) for value in values):
            return separator.end()
        if separator["sign"] in "=:" and _continues(rest, quoted) and _has_secret_name(name[0]):
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
        is_harmless = _HARMLESS.fullmatch(string["value"])
        return string[0] if is_harmless else f"{string['quote']}{HIDDEN}{string['end']}"

    return _QUOTED.sub(masked_string, value)
