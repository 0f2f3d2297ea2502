"""Flags that several commands have."""

from __future__ import annotations

import argparse

from fdfo_client._access import add_access_arguments
from fdfo_client._arguments import parameter, typed
from fdfo_client._channel import parse_targets

DEFAULT_TARGET = "127.0.0.1:50051"


def add_target(parser: argparse.ArgumentParser, where: argparse._ActionsContainer | None = None) -> None:
    """--target and who may connect to it. `where`: the group of flags that --target is one of."""
    (where or parser).add_argument(
        "--target",
        type=typed(parse_targets),
        default=parse_targets(DEFAULT_TARGET),
        metavar="HOST:PORT,...",
        help=f"the scheduler, or several ({DEFAULT_TARGET})",
    )
    add_access_arguments(parser)


def add_temperature(parser: argparse.ArgumentParser) -> None:
    """--temperature."""
    parser.add_argument("--temperature", type=float, metavar="T", help="0 takes the most probable token; up to 2 (0)")


def add_algorithm(parser: argparse.ArgumentParser) -> None:
    """--algorithm, and --param with a list of (name, value)."""
    parser.add_argument("--algorithm", metavar="NAME", help="denoising algorithm (the server's default)")
    parser.add_argument(
        "--param",
        action="append",
        type=parameter,
        metavar="NAME=VALUE",
        help="parameter of the algorithm, such as threshold=0.9; may be given several times",
    )
