"""`python -m fdfo_client` is the command `fdfo`."""

from __future__ import annotations

import sys

from fdfo_client.cli import main

if __name__ == "__main__":
    sys.exit(main())
