"""Checkpoint names: templates with fields for the epoch, the step and metrics."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from leyden.checkpoint.format import staging
from leyden.core.errors import ConfigurationError, nearest
from leyden.core.rank_zero import warn

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
COUNTERS = ("epoch", "step")


def metrics_in(template: str) -> set[str]:
    """Returns the names of the metrics in a template.

    Example:
        >>> metrics_in("{epoch}-{val/loss:.2f}")
        {'val/loss'}
    """
    return {name for name, _ in _FIELD.findall(template)} - set(COUNTERS)


def check_template(template: object) -> None:
    """Raises ConfigurationError for a template that is empty, leads out of its folder, or has an invalid field."""
    if not isinstance(template, str) or not template:
        raise ConfigurationError(
            f"filename={template!r}: use a template such as '{{epoch}}-{{val_loss:.2f}}', or None."
        )
    plain = _FIELD.sub("", template)
    if "\\" in plain or any(part in ("", ".", "..") for part in folders_in(template)):
        raise ConfigurationError(
            f"filename={template!r} is not a path below dirpath: separate folders with single slashes, as in "
            "'fold-1/{epoch}', and put parent folders in dirpath."
        )
    if "{" in plain or "}" in plain:
        raise ConfigurationError(f"filename={template!r} has an unmatched brace: write fields as {{epoch}}.")
    for name, spec in _FIELD.findall(template):
        try:
            format(0 if name in COUNTERS else 0.0, spec)
        except ValueError as error:
            raise ConfigurationError(
                f"filename={template!r}: {spec!r} cannot format {name!r} ({error}). Write it as in {{val_loss:.2f}}."
            ) from None


def folders_in(template: str) -> list[str]:
    """Splits a template at its slashes, except for slashes inside fields (in the name of a metric).

    Example:
        >>> folders_in("fold-1/{epoch}-{val/loss:.2f}")
        ['fold-1', '0-0']
    """
    return _FIELD.sub("0", template).split("/")


@dataclass(frozen=True, slots=True)
class NameStyle:
    """The separators and the extension of checkpoint names.

    Args:
        equals: the separator between the name of a field and its value; None writes the value alone.
        join: the separator before a version and after a prefix.
        extension: the suffix of every name.

    Example:
        >>> NameStyle(equals="_", extension=".ckpt").name("{epoch}-{val/loss:.2f}", {"epoch": 3, "val/loss": 0.25}, 1)
        'epoch_3-val_loss_0.25-v1.ckpt'
    """

    equals: str | None = "="
    join: str = "-"
    extension: str = ""

    def check(self, template: object) -> None:
        """Raises ConfigurationError if separators, extension and template do not make valid checkpoint names."""
        names = {"CHECKPOINT_EQUALS_CHAR": self.equals or "", "CHECKPOINT_JOIN_CHAR": self.join}
        for name, value in {**names, "FILE_EXTENSION": self.extension}.items():
            if not isinstance(value, str) or "/" in value or "\\" in value:
                raise ConfigurationError(f"{name}={value!r}: use a string without slashes.")
        check_template(template)
        self.check_length(str(template))

    def check_length(self, template: str, folder: str | os.PathLike[str] | None = None) -> None:
        """Raises ConfigurationError if names, including a version, are too long for the file system of a folder.

        Without an existing folder, the limit is that of common file systems.
        """
        values = {name: 10**6 if name in COUNTERS else -0.123456 for name, _ in _FIELD.findall(template)}
        for part in self.numbered(self.name(template, values), 10).split("/"):
            staging.check_length(part, folder)

    def name(
        self, template: str, values: Mapping[str, float], version: int | None = None, prefix: str | None = None
    ) -> str:
        """Fills in a template; see `format_name`."""
        parts = (prefix, format_name(template, values, self.equals), None if version is None else f"v{version}")
        return self.join.join(part for part in parts if part) + self.extension

    def numbered(self, name: str, version: int) -> str:
        """Adds a version to a name that `name` returned."""
        return f"{name.removesuffix(self.extension)}{self.join}v{version}{self.extension}"


def format_name(template: str, values: Mapping[str, float], equals: str | None = "=") -> str:
    """Fills in a template. A metric that was not logged is written as `none`, with a warning.

    `equals` separates the name of a field from its value; None writes the value alone.

    Example:
        >>> format_name("{epoch}-{val/loss:.2f}", {"epoch": 3, "val/loss": 0.25})
        'epoch=3-val_loss=0.25'
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name in values:
            text = format(values[name], spec)
        else:
            hint = nearest(name, values)
            warn(f"the checkpoint's filename {template!r} names {name!r}, which was not logged. {hint}")
            text = "none"
        # Only slashes of the template itself separate folders.
        return re.sub(r"[/\\]", "_", text if equals is None else f"{name}{equals}{text}")

    return _FIELD.sub(fill, template)
