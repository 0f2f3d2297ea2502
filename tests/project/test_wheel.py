"""The wheel: what is in it, what it asks for, and that each extra imports in an empty environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("common", "fdfo", "fdfo_client", "scheduler_svc", "worker_svc")
TORCH = "torch==2.13.0"  # the Makefile's

BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy so that the tree stays clean."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        copytree(ROOT / package, source / package, ignore=ignore_patterns("__pycache__"))
    for name in ("tests", "tools"):  # there, and yet not to be packed
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        copy(ROOT / name, source)
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_has_the_packages_and_nothing_else(wheel: Path) -> None:
    """In the wheel are the sources, stubs and type markers of the five packages, and its own metadata."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".css", ".js", ".jsonl") or path.name == "py.typed"
    }
    assert packed == wanted
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed


def test_wheel_names_no_place_of_this_machine(wheel: Path) -> None:
    """No file in the wheel holds the path of the tree it was built from."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if str(ROOT).encode() in archive.read(name)]
    assert not found


def test_only_the_worker_asks_for_torch(metadata: Message) -> None:
    """torch and transformers are asked for by the extra `worker` alone, in a range that 2.11 and 2.13 satisfy."""
    asked = metadata.get_all("Requires-Dist", [])
    torch = [line for line in asked if line.startswith(("torch", "transformers"))]
    assert len(torch) == 2
    assert all(line.endswith("""extra == "worker\"""") for line in torch)
    assert any(line.startswith("torch<3,>=2.11") for line in torch)
    assert {"cli", "client", "scheduler", "worker", "bench", "flashinfer", "gateway", "tracing", "docs", "dev"} == set(
        metadata.get_all("Provides-Extra", [])
    )


def test_wheel_has_its_license_and_command(wheel: Path, metadata: Message) -> None:
    """The license travels along, and `fdfo` is a command."""
    assert metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()}
    assert "Apache License" in texts["LICENSE"]
    assert "fdfo = fdfo_client.cli:main" in texts["entry_points.txt"]


TORCH_MAY_BE = """
import importlib.util, sys
assert (importlib.util.find_spec("torch") is not None) == (sys.argv[1] == "torch"), "torch"
for name in sys.argv[2:]:
    __import__(name)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("", ["fdfo_client", "fdfo_client.cli"]),
        ("[client]", ["fdfo_client", "fdfo_client.cli"]),
        ("[scheduler]", ["fdfo_client", "scheduler_svc.__main__"]),
        ("[scheduler,gateway]", ["scheduler_svc.__main__", "smg_grpc_proto"]),
        ("[worker]", ["fdfo_client", "worker_svc.__main__"]),
    ],
)
def test_extra_imports_in_an_empty_environment(wheel: Path, tmp_path: Path, extra: str, modules: list[str]) -> None:
    """The wheel with an extra, and nothing but what it asks for, imports; torch is there for the worker only."""
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env/bin/python")
    with_torch = "worker" in extra
    wanted = [TORCH] if with_torch else []
    subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted, f"fdfo{extra} @ {wheel.as_uri()}"], check=True)
    command = [python, "-c", TORCH_MAY_BE, "torch" if with_torch else "-", *modules]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    help_page = subprocess.run([tmp_path / "env/bin/fdfo", "--help"], capture_output=True, text=True, check=False)
    assert help_page.returncode == 0, help_page.stderr


@pytest.mark.long
def test_extra_flashinfer_resolves_beside_the_worker(wheel: Path) -> None:
    """pip finds versions for worker and flashinfer together; they are not installed, being some gigabytes."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", f"fdfo[worker,flashinfer] @ {wheel.as_uri()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "flashinfer-python" in done.stdout
