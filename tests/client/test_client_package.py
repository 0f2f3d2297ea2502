"""The package as a user imports it."""

from __future__ import annotations

import asyncio
import importlib.resources
import inspect
import json
import subprocess
import sys
import types
from collections.abc import AsyncGenerator, Generator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, assert_type, get_origin

import pytest

import fdfo_client.testing
from fdfo_client import AsyncClient, Client, Completion, Event, FdfoError, ServerInfo
from fdfo_client._options import GenerateOptions
from fdfo_client.testing import FakeScheduler, serving
from tools import generate_sync_client

PAGE = (Path(__file__).parents[2] / "docs/client.md").read_text()
PUBLIC = [fdfo_client, fdfo_client.testing]

LOOK = """
import json, sys, time
started_s = time.process_time()
import fdfo_client
import_s = time.process_time() - started_s
modules = sorted(sys.modules)
import fdfo_client.testing
print(json.dumps({"import_s": import_s, "modules": modules, "with_testing": sorted(sys.modules)}))
"""


def look() -> Any:
    """What a fresh interpreter sees of the package."""
    return json.loads(subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True).stdout)


@cache
def seen() -> Any:
    return look()


def own_names(module: ModuleType) -> set[str]:
    """The public names that a module defines or its package gathers, without what it imports from elsewhere."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name != "annotations"
        and (module is fdfo_client or getattr(value, "__module__", module.__name__) == module.__name__)
    }


@pytest.mark.parametrize("module", PUBLIC)
def test_all_lists_what_is_importable(module: ModuleType) -> None:
    """`__all__` names every public name and no other, once."""
    assert len(module.__all__) == len(set(module.__all__))
    aliases = {name for name in module.__all__ if get_origin(getattr(module, name)) or name in ("Event", "Step")}
    assert own_names(module) | aliases == set(module.__all__)


def test_what_the_import_brings_is_private() -> None:
    """Of the package's modules only `testing` is public of those that it and the package itself need."""
    ours = {name.removeprefix("fdfo_client.") for name in seen()["with_testing"] if name.startswith("fdfo_client.")}
    assert len(ours) > 5
    assert {name for name in ours if not name.startswith("_")} == {"testing"}


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_documented(module: ModuleType) -> None:
    """Each name stands on the page of the library; classes, functions and their public methods have docstrings."""
    for name in module.__all__:
        assert f"`{name}`" in PAGE or f"`{name}(" in PAGE or (f"  {name} " in PAGE), name
        value = getattr(module, name)
        if not isinstance(value, type | types.FunctionType):
            continue  # an alias or a constant
        assert value.__doc__, name
        for part_name, part in vars(value).items() if isinstance(value, type) else ():
            if not part_name.startswith("_") and isinstance(part, types.FunctionType | property):
                assert part.__doc__, f"{name}.{part_name}"


def test_the_tree_of_errors_is_on_the_page() -> None:
    """The page has every error, by its place in the tree."""
    tree = PAGE.partition("## Errors")[2].split("```")[1].splitlines()
    on_page = [(len(line) - len(line.lstrip()), line.split()[0]) for line in tree if line]
    kinds = [kind for kind in vars(fdfo_client).values() if isinstance(kind, type) and issubclass(kind, FdfoError)]
    depths = {kind.__name__: 2 * (len(kind.__mro__) - len(FdfoError.__mro__)) for kind in kinds}
    assert {name: depth for depth, name in on_page} == depths and len(on_page) == len(depths)


def test_the_import_is_light() -> None:
    """Importing the client loads no torch, no numpy, no tokenizer, no template, no service, and takes
    under 0.3 s of processor time."""
    for modules in (seen()["modules"], seen()["with_testing"]):
        roots = {module.partition(".")[0] for module in modules}
        heavy = {"torch", "numpy", "transformers", "tokenizers", "jinja2", "structlog"}
        assert not roots & {*heavy, "scheduler_svc", "worker_svc"}
    assert min(seen()["import_s"], look()["import_s"]) < 0.3


def test_the_package_says_that_it_is_typed() -> None:
    """py.typed is part of the package."""
    assert importlib.resources.files("fdfo_client").joinpath("py.typed").is_file()


def test_every_option_is_documented() -> None:
    """The docstring of GenerateOptions has a line for each option, and the page names it."""
    lines = (GenerateOptions.__doc__ or "").splitlines()
    documented = [line.strip().partition(":")[0] for line in lines if ":" in line]
    assert documented == list(GenerateOptions.__annotations__)
    assert not [name for name in documented if name not in PAGE]


def test_the_blocking_client_is_made_from_the_async_one() -> None:
    """The file is what the tool makes, so both have the same methods, parameters and docstrings."""
    assert generate_sync_client.TARGET.read_text() == generate_sync_client.generate(), "run `make sync-client`"


def test_calls_have_types() -> None:
    """mypy knows what each method of both clients gives, and help() what each of its parameters is."""

    async def ask(target: str) -> None:
        async with AsyncClient(target) as client:
            assert_type(client, AsyncClient)
            assert_type(await client.generate("x", temperature=0.5), Completion)
            assert_type(client.stream(prompt_ids=[1]), AsyncGenerator[Event, None])
            assert_type(await client.abort("r"), bool)
            assert_type(await client.wait_ready(), ServerInfo)

    with serving(FakeScheduler()) as target:
        with Client(target) as client:
            assert_type(client, Client)
            assert_type(client.generate("x", temperature=0.5), Completion)
            assert_type(client.stream(prompt_ids=[1]), Generator[Event, None, None])
            assert_type(client.abort("r"), bool)
            assert_type(client.wait_ready(), ServerInfo)
        asyncio.run(ask(target))
    for name in ("generate", "stream", "abort", "server_info", "wait_ready"):
        blocking, waiting = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
        assert blocking.parameters == waiting.parameters
