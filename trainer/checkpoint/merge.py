"""The former place of `leyden.checkpoint.merge`."""

from leyden.checkpoint.merge import merge as merge
