"""The former place of `leyden.cli`."""

from leyden.cli import __getattr__ as __getattr__
