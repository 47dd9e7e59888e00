"""The former place of `leyden.checkpoint`."""
