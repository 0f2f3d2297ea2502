"""The Dockerfiles, without a build; `make k8s-run` builds and runs them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.deploy.manifests import MANIFESTS, OVERLAYS, ROOT, build, tool, workloads

README = MANIFESTS / "README.md"
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_finds_nothing(path: Path) -> None:
    """The rules of hadolint hold, none of them switched off."""
    command = [tool("hadolint"), "--no-fail", "--disable-ignore-pragma", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_images_run_as_the_user_of_the_pods(path: Path) -> None:
    """Each ends as 65532 with its program as first process, so that it gets SIGTERM itself."""
    lines = path.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 65532:65532"
    assert next(line for line in lines if line.startswith("ENTRYPOINT")).startswith('ENTRYPOINT ["')


def test_targets_and_model_of_the_pods() -> None:
    """The worker's images are targets of its Dockerfile; the model of dev-cpu is where the images have it."""
    text = (ROOT / "deploy/docker/worker.Dockerfile").read_text()
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))
    paths = {arg for one in workloads(build("overlays/dev-cpu")) for arg in one.args if arg.startswith("--model-path=")}
    assert paths == {"--model-path=/opt/fdfo/models/tiny-llada2"}
    for name in ("scheduler", "worker"):
        assert "cp -r models/tiny-llada2 /opt/fdfo/models/" in (ROOT / f"deploy/docker/{name}.Dockerfile").read_text()
    assert (ROOT / "models/tiny-llada2").is_dir()


def test_triton_finds_a_compiler() -> None:
    """The image for CUDA has the C compiler and headers that Triton's first kernel needs, and ends without rights."""
    (stage,) = re.findall(
        r"^FROM runtime AS cuda$(.*?)^FROM ", (ROOT / "deploy/docker/worker.Dockerfile").read_text(), re.M | re.S
    )
    (installed,) = re.findall(r"apt-get install (.*?) \\$", stage, re.M)
    assert {word.strip("'").partition("=")[0] for word in installed.split()} >= {"gcc", "libc6-dev"}
    assert re.findall(r"^USER (\S+)$", stage, re.M)[-1] == "65532:65532"


def test_no_overlay_asks_for_kernels_that_the_image_lacks() -> None:
    """The image for CUDA has no nvcc, without which FlashInfer only loads what was compiled before: that is opt-in."""
    text = (ROOT / "deploy/docker/worker.Dockerfile").read_text()
    assert "aot" not in text
    for name in OVERLAYS:
        for one in workloads(build(f"overlays/{name}")):
            assert not any(arg.startswith("--attention-backend") for arg in one.args)
    (python,) = set(re.findall(r"python:(3\.\d+)-", text))
    assert f"/opt/fdfo/lib/python{python}/site-packages/flashinfer/data/aot\n" in README.read_text()


def test_what_the_package_is_made_of_reaches_the_build() -> None:
    """.dockerignore lets the packages in, and what pyproject.toml names as files; nothing else but the small model."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert kept == packages | {"LICENSE", "README.md", "pyproject.toml", "models/tiny-llada2"}


def test_extras_of_the_images_exist() -> None:
    """pip only warns of an extra that is not there, and would leave its packages out."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in DOCKERFILES:
        named = {extra for words in re.findall(r"'\.\[([\w,]+)\]'", path.read_text()) for extra in words.split(",")}
        assert named <= extras.keys()
        assert named or path.name == "openai-gateway.Dockerfile"


def test_torch_is_the_one_of_the_tests() -> None:
    """The worker's image has the torch that the Makefile installs; the gateway's has the smg of the tests."""
    (torch,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"^ARG TORCH=(\S+)$", (ROOT / "deploy/docker/worker.Dockerfile").read_text(), re.M)) == {
        torch
    }
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    (smg,) = [one for one in dev if one.startswith("smg==")]
    assert f"pip install {smg}\n" in (ROOT / "deploy/docker/openai-gateway.Dockerfile").read_text()
