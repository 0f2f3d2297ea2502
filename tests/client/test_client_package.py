"""The package as a user imports it."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import sys
from typing import Any

from fdfo_client._options import GenerateOptions

LOOK = """
import json, sys, time, types
before = set(sys.modules)
started_s = time.process_time()
import fdfo_client
import_s = time.process_time() - started_s
names = [name for name, value in vars(fdfo_client).items()
         if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"]
print(json.dumps({"import_s": import_s, "names": names, "all": fdfo_client.__all__, "modules": sorted(sys.modules)}))
"""


def look() -> Any:
    """What a fresh interpreter sees of the package."""
    return json.loads(subprocess.run([sys.executable, "-c", LOOK], check=True, capture_output=True).stdout)


def test_all_lists_what_is_importable() -> None:
    """`__all__` is sorted and names exactly the public names of the package."""
    seen = look()
    assert sorted(seen["names"]) == sorted(seen["all"])
    assert seen["all"] == sorted(seen["all"])


def test_the_import_is_light() -> None:
    """Importing the client loads no torch, no numpy and no service, and takes under 0.3 s of processor time."""
    seen = look()
    roots = {module.partition(".")[0] for module in seen["modules"]}
    assert not roots & {"torch", "numpy", "transformers", "structlog", "scheduler_svc", "worker_svc"}
    assert min(seen["import_s"], look()["import_s"]) < 0.3


def test_the_package_says_that_it_is_typed() -> None:
    """py.typed is part of the package."""
    assert importlib.resources.files("fdfo_client").joinpath("py.typed").is_file()


def test_every_option_is_documented() -> None:
    """The docstring of GenerateOptions has a line for each option."""
    lines = (GenerateOptions.__doc__ or "").splitlines()
    documented = [line.strip().partition(":")[0] for line in lines if ":" in line]
    assert documented == list(GenerateOptions.__annotations__)
