"""`fdfo chaos`: becomes `python -m tests.chaos` of the checkout it is in."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fdfo_client._errors import InvalidRequest

CHECKOUT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None: all words after `fdfo chaos` are passed on, --help too."""


def main(arguments: argparse.Namespace) -> int:
    """Returns only by an exception. Raises InvalidRequest where there are no scenarios."""
    if not (CHECKOUT / "tests/chaos/__main__.py").is_file():
        raise InvalidRequest(
            f"chaos: the scenarios are in tests/chaos of the project's repository, not in the package that is "
            f"installed in {CHECKOUT}; run it in a checkout, after `make venv`, as .venv/bin/fdfo"
        )
    path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    sys.stdout.flush()
    command = [sys.executable, "-P", "-m", "tests.chaos", *arguments.words]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
