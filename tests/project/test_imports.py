"""Imports run one way (docs/architecture.md), and torch stays in the worker."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bench", "common", "fdfo", "fdfo_client", "scheduler_svc", "worker_svc")

# A part of the tree -> the parts of it that it may import.
ALLOWED = {
    "bench": {"bench", "fdfo_client", "scheduler_svc", "worker_svc", "common", "fdfo"},
    "common": {"common", "fdfo"},
    "fdfo": {"fdfo"},
    "fdfo_client": {"fdfo_client", "fdfo"},
    "scheduler_svc": {"scheduler_svc", "common", "fdfo"},
    "worker_svc": {"worker_svc", "common", "fdfo"},
    # Only "which tokens this step": no loop, no KV, no model, no gRPC.
    "worker_svc/algorithms": {"worker_svc.algorithms"},
}
# `fdfo serve` and `fdfo replay --virtual-time` take flags of both services; they may read which there are, and `serve`
# the files that these name. The latter also runs both in its process, in a module that is imported when it does.
SETTINGS = {"common.configuration", "common.settings", "scheduler_svc.settings", "worker_svc.settings"}
VIRTUAL = "fdfo_client.bench.virtual"
GATEWAY = "scheduler_svc.gateway"
ALSO_ALLOWED = {
    # TLS and keys of a channel: one code for the scheduler's way to workers and the client's to schedulers.
    Path("fdfo_client/_channel.py"): {
        "common.api_keys.read_api_key",
        "common.connection",
        "common.errors.ServiceError",
    },
    Path("fdfo_client/serve.py"): SETTINGS,
    Path("fdfo_client/serve_settings.py"): SETTINGS | {"scheduler_svc.config_files"},
    # What a model folder is, said by who serves it.
    Path("fdfo_client/doctor/model.py"): {
        "common.model_folder",
        "common.tokenizer_files",
        "common.architectures",
        "common.fingerprint",
        "worker_svc.settings",
    },
    Path("fdfo_client/doctor/services.py"): {"common.fingerprint"},
    Path("fdfo_client/commands/info.py"): {"common.fingerprint"},
    # The addresses behind a name, as schedulers find their workers.
    Path("fdfo_client/top/sampling.py"): {"common.resolving"},
    # The exit status of a service whose configuration is wrong.
    Path("fdfo_client/child_process.py"): SETTINGS,
    Path("fdfo_client/commands/replay.py"): SETTINGS | {"common.logging"},
    Path("fdfo_client/bench/virtual.py"): {"common", "scheduler_svc", "worker_svc"},
}

# A part -> foreign modules that it never imports.
FORBIDDEN = {
    "common": {"torch"},
    "fdfo": {"torch"},
    "fdfo_client": {"torch", "transformers"},
    "scheduler_svc": {"torch"},
    "worker_svc/algorithms": {"grpc", "google", "asyncio", "threading", "concurrent", "multiprocessing", "queue"},
    "worker_svc/attention": {"grpc", "google", "asyncio"},
    "worker_svc/kv": {"grpc", "google", "asyncio"},
    "worker_svc/models": {"grpc", "google", "asyncio"},
}


def _imports(text: str) -> Iterator[str]:
    """Every module that is imported, in functions too; `from a import b` counts as a.b, since b may be a module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _within(module: str, parts: set[str]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def _faults(path: Path, text: str) -> list[str]:
    """What a file of the tree imports and may not."""
    faults = []
    for part, allowed in ALLOWED.items():
        if not path.is_relative_to(part):
            continue
        for module in _imports(text):
            own = module.partition(".")[0] in PACKAGES
            if own and not _within(module, allowed | ALSO_ALLOWED.get(path, set())):
                faults.append(f"{path} imports {module}")
    for part, forbidden in FORBIDDEN.items():
        if path.is_relative_to(part):
            faults += [f"{path} imports {module}" for module in _imports(text) if _within(module, forbidden)]
    return faults


def test_imports_run_one_way() -> None:
    """No file imports what its part of the tree may not, at the top or inside a function."""
    paths = [path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 20
    faults = [fault for path in paths for fault in _faults(path, (ROOT / path).read_text())]
    assert not faults


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("scheduler_svc/queue.py", "import worker_svc.rows"),
        ("scheduler_svc/text.py", "def f():\n    import torch"),
        ("worker_svc/server.py", "from scheduler_svc import queue"),
        ("worker_svc/algorithms/base.py", "from worker_svc.kv.store import KVStore"),
        ("worker_svc/algorithms/base.py", "import grpc.aio"),
        ("common/packing.py", "from torch import Tensor"),
        ("fdfo_client/cli.py", "from common.settings import setting"),
        ("fdfo_client/serve.py", "from worker_svc.server import WorkerServicer"),
        ("fdfo_client/commands/replay.py", "from worker_svc.denoise import DenoiseLoop"),
        ("fdfo_client/bench/virtual.py", "import torch"),
    ],
)
def test_a_forbidden_import_is_found(path: str, text: str) -> None:
    """Each kind of forbidden import is seen, so the check above can fail."""
    assert _faults(Path(path), text)


IMPORT_ALL = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Absent())
for package in PACKAGES:
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if module.name not in EXCEPT:
            importlib.import_module(module.name)
"""


def _import_all(packages: tuple[str, ...], absent: tuple[str, ...], but: tuple[str, ...] = ()) -> None:
    code = f"PACKAGES = {packages!r}\nABSENT = {absent!r}\nEXCEPT = {but!r}\n{IMPORT_ALL}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_scheduler_imports_without_torch() -> None:
    """All modules of the scheduler and of common import where what only the worker declares is absent, and all but the
    one for gateways without their extra."""
    absent = ("torch", "transformers", "safetensors", "numpy", "smg_grpc_proto", "opentelemetry")
    _import_all(("fdfo", "common", "scheduler_svc"), absent, (GATEWAY,))


def test_client_imports_with_the_base_dependencies() -> None:
    """All modules of the client but the one that runs the services import where what only these declare is absent."""
    services_only = (
        "structlog",
        "opentelemetry",
        "tokenizers",
        "jinja2",
        "yaml",
        "grpc_health",
        "grpc_reflection",
        "smg",
        "prometheus_client",
    )
    _import_all(("fdfo", "fdfo_client"), ("torch", "transformers", "safetensors", "numpy", *services_only), (VIRTUAL,))
