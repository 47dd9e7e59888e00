"""Names of a package that are imported on first use, so that importing the package stays fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def lazy_name(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Returns a name of a package for the package's `__getattr__`, and keeps it there.

    The `__getattr__` is written out in each package, since type checkers look for its definition.

    Args:
        package: the package's `__name__`. In a checkout it may be `callbacks` as well as `leyden.callbacks`.
        homes: the module that defines each name.
        name: the missing name.

    Raises:
        AttributeError: if the package has no such name.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(homes[name]), name)
    setattr(sys.modules[package], name, value)
    return value
