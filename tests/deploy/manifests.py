"""The objects of deploy/k8s as kustomize builds them, and what the tests ask of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy" / "k8s"
OVERLAYS = ("dev-cpu", "single-gpu", "multi-gpu", "two-versions/v1", "two-versions/v2")
JOBS = ("smoke-test", "smoke-test-tls", "model-download")
# What no overlay has, on top of one: it does not go together with what the overlays have.
EXTRA = {"tls on single-gpu": ("overlays/single-gpu", "components/tls")}
BUILDS = (*(f"overlays/{name}" for name in OVERLAYS), *(f"jobs/{name}" for name in JOBS), *EXTRA)

Object = dict[str, Any]  # of Kubernetes


def tool(name: str) -> str:
    """A program of the environment that runs the tests."""
    path = Path(sys.executable).parent / name
    assert path.exists(), f"{path} is missing: `make venv` installs it"
    return str(path)


@cache
def build(name: str) -> tuple[Object, ...]:
    """The objects of an overlay, a job or one of EXTRA."""
    if name not in EXTRA:
        return _kustomize(MANIFESTS / name)
    resource, component = EXTRA[name]
    with tempfile.TemporaryDirectory() as folder:  # kustomize wants relative paths
        shutil.copytree(MANIFESTS, folder, dirs_exist_ok=True)
        content = {"resources": ["../" + resource], "components": ["../" + component], "namespace": "fdfo"}
        (Path(folder) / "extra").mkdir()
        (Path(folder) / "extra/kustomization.yaml").write_text(yaml.safe_dump(content))
        return _kustomize(Path(folder) / "extra")


def _kustomize(folder: Path) -> tuple[Object, ...]:
    done = subprocess.run([tool("kubectl"), "kustomize", str(folder)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # warnings: of what is deprecated
    return tuple(yaml.load_all(done.stdout, yaml.CSafeLoader))  # five times as fast as the one in Python


def of_kind(objects: tuple[Object, ...], *kinds: str) -> Iterator[Object]:
    return (one for one in objects if one["kind"] in kinds)


def find(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    """The one object of this kind and name."""
    (found,) = [one for one in of_kind(objects, kind) if one["metadata"]["name"] == name]
    return found


@dataclass(frozen=True)
class Workload:
    """A Deployment or a Job, and its one container."""

    kind: str
    name: str
    labels: Mapping[str, str]  # of its pods
    spec: Object  # of its pods
    container: Object

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}

    @property
    def args(self) -> list[str]:
        return list(self.container["args"])

    def mounted(self, path: str) -> Object:
        """The volume that a path inside the container lies in. Raises KeyError where it lies in none."""
        for mount in self.container.get("volumeMounts", ()):
            if Path(path).is_relative_to(mount["mountPath"]):
                return next(volume for volume in self.spec["volumes"] if volume["name"] == mount["name"])
        raise KeyError(path)


def workloads(objects: tuple[Object, ...]) -> list[Workload]:
    found = []
    for one in of_kind(objects, "Deployment", "Job"):
        template = one["spec"]["template"]
        (container,) = template["spec"]["containers"]
        labels = template["metadata"]["labels"]
        found.append(Workload(one["kind"], one["metadata"]["name"], labels, template["spec"], container))
    return found


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels, matchExpressions with In) takes these labels."""
    assert selector.keys() <= {"matchLabels", "matchExpressions"}, selector
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    wanted = selector.get("matchLabels", {}).items()
    return wanted <= labels.items() and all(labels.get(one["key"]) in one["values"] for one in expressions)
