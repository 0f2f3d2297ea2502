"""podman with a storage of its own: nothing it does is seen by, or touches, other images and containers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = "docker.io/library/python:3.11-slim-bookworm"  # what the Dockerfiles begin with
PYTHON_VERSION = "3.11"
NETWORK = "fdfo"
PROGRAMS = ("podman", "buildah", "runc", "catatonit", "iptables", "debootstrap")
# In a container that lacks rights for it, limits cannot be raised; runc and cgroupfs go with every cgroup version.
CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=20000:20000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
"""


class PodmanError(Exception):
    """What could not be done, and what podman said."""


def check_programs() -> None:
    """Raises PodmanError naming what to install."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise PodmanError(f"missing: {' '.join(missing)}; on Debian: apt-get install {' '.join(PROGRAMS)}")
    if os.geteuid() != 0:
        raise PodmanError("must be run as root: it makes networks and a base image")


class Podman:
    """`cache`: a folder for images, wheels and the base image's files."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        configuration = cache / "containers.conf"
        configuration.write_text(CONFIGURATION)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}

    def __call__(self, *words: str, timeout_s: float = 120, stdin: str | None = None) -> str:
        """Run a podman command and return what it prints. Raises PodmanError."""
        done = self._run(words, timeout_s, stdin)
        if done.returncode:
            raise PodmanError(f"podman {' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def _run(self, words: Sequence[str], timeout_s: float, stdin: str | None) -> subprocess.CompletedProcess[str]:
        storage = ["--root", str(self._cache / "storage"), "--runroot", str(self._cache / "runroot")]
        command = ["podman", *storage, "--log-level", "error", *words]
        return subprocess.run(
            command, env=self._environment, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=timeout_s
        )

    # Images -----------------------------------------------------------------------------------------------------

    def make_base_image(self) -> None:
        """A minimal Debian with Python under the public image's name, so that unmodified Dockerfiles find it. Once."""
        if self._run(["image", "exists", BASE_IMAGE], 30, None).returncode == 0:
            return
        files = self._cache / "rootfs"
        if not (files / "usr/bin/python3").exists():
            words = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(files)]
            done = subprocess.run(words, capture_output=True, text=True, timeout=900)
            if done.returncode:
                raise PodmanError(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr}")
        archive = self._cache / "rootfs.tar"
        subprocess.run(["tar", "-C", str(files), "-cf", str(archive), "."], check=True, timeout=300)
        self("import", str(archive), BASE_IMAGE, timeout_s=300)
        archive.unlink()

    def fetch_wheels(self, torch: str) -> None:
        """Wheels of all that the images install, for the base image's Python; anew when the needs change."""
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        extras = project["project"]["optional-dependencies"]
        needs = [torch, "wheel", *project["build-system"]["requires"], *project["project"]["dependencies"]]
        needs += [need for extra in ("scheduler", "gateway", "worker", "tracing") for need in extras[extra]]
        wheels, stamp = self._cache / "wheels", self._cache / "wheels.txt"
        if stamp.exists() and stamp.read_text() == "\n".join(needs):
            return
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(wheels)]
        words = [*pip, f"--python-version={PYTHON_VERSION}", *needs]
        done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
        if done.returncode:
            raise PodmanError(f"{' '.join(words)}: {done.stderr[-2000:]}")
        stamp.write_text("\n".join(needs))

    def build(self, image: str, dockerfile: str, *words: str) -> None:
        """Build a Dockerfile of deploy/docker as it is, without network."""
        wheels = self._cache / "wheels"
        offline = ["--pull=never", "--network=none", f"--volume={wheels}:/wheels:ro"]
        arguments = ["--build-arg=PIP_NO_INDEX=1", "--build-arg=PIP_FIND_LINKS=/wheels"]
        file = f"--file=deploy/docker/{dockerfile}"
        self("build", *offline, *arguments, *words, file, f"--tag={image}", ".", timeout_s=1800)

    def image_size_bytes(self, image: str) -> int:
        return int(self("image", "inspect", image, "--format", "{{.Size}}"))

    # Pods -------------------------------------------------------------------------------------------------------

    def clean(self) -> None:
        """Remove all pods of this storage, and the network."""
        for _ in range(5):  # what is just ending cannot be removed
            if self._run(["pod", "rm", "--force", "--all", "--time", "1"], 120, None).returncode == 0:
                break
            time.sleep(1)
        self("volume", "prune", "--force")
        self("network", "rm", "--force", NETWORK)

    def make_network(self) -> None:
        """Pods see each other and nothing else."""
        self("network", "create", "--internal", NETWORK)

    def play(self, objects: str, names: Iterable[str]) -> None:
        """Start the pod in these objects (YAML); the network resolves each of the names to it."""
        network = NETWORK + ":" + ",".join(f"alias={name}" for name in names)
        self("play", "kube", "--network", network, "-", stdin=objects)

    def address(self, pod: str) -> str:
        """The pod's IP address."""
        infra = json.loads(self("pod", "inspect", pod))["InfraContainerID"]
        (inspected,) = json.loads(self("inspect", infra))
        return str(inspected["NetworkSettings"]["Networks"][NETWORK]["IPAddress"])

    def logs(self, pod: str, name: str) -> str:
        """Standard output and error of a container."""
        done = self._run(["logs", f"{pod}-{name}"], 30, None)
        return done.stdout + done.stderr
