"""Entry point of `python -m leyden …`, which is the same as `leyden …`."""

from __future__ import annotations

import sys

from leyden.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
