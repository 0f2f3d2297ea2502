"""The stubs in fdfo/ and the protos they are made from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.generate_stubs import ROOT, StubsError, generate

BUF = Path(sys.executable).parent / "buf"


def _buf(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def _generated(folder: Path) -> dict[str, str]:
    paths = [*folder.rglob("*_pb2.py"), *folder.rglob("*_pb2.pyi"), *folder.rglob("*_pb2_grpc.py")]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_stubs_are_fresh(tmp_path: Path) -> None:
    """What the pinned tools make of the protos is what the repository has, file by file."""
    try:
        generate(tmp_path)
    except StubsError as error:
        pytest.fail(f"the pinned tools could not be had: {error}")
    fresh, kept = _generated(tmp_path / "fdfo"), _generated(ROOT / "fdfo")
    assert sorted(fresh) == sorted(kept)
    stale = [name for name in fresh if fresh[name] != kept[name]]
    assert not stale, "run `make protos`"


def test_stubs_run_under_the_declared_versions() -> None:
    """The stubs ask for protobuf 6.31.1, the lowest that pyproject.toml allows, so any allowed one runs them."""
    for name, text in _generated(ROOT / "fdfo").items():
        if name.endswith("_pb2.py"):
            assert "# Protobuf Python Version: 6.31.1\n" in text
        if name.endswith("_pb2_grpc.py"):
            assert "GRPC_GENERATED_VERSION = '1.76.0'" in text
    project = (ROOT / "pyproject.toml").read_text()
    assert '"protobuf>=6.31.1,<8"' in project
    assert '"grpcio>=1.76"' in project


def test_protos_keep_to_the_lint_rules() -> None:
    """`buf lint` has nothing to say."""
    done = _buf("lint")
    assert done.returncode == 0, done.stdout + done.stderr


def test_protos_are_formatted() -> None:
    """`buf format` would change nothing."""
    done = _buf("format", "--diff", "--exit-code")
    assert done.returncode == 0, done.stdout + done.stderr


def test_protos_break_no_older_peer() -> None:
    """Against the protos of the last release nothing is broken on the wire or in JSON."""
    done = _buf("breaking", "--against", "protos/baseline.binpb")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_breaking_change_is_noticed(tmp_path: Path) -> None:
    """A field whose type changes is refused against the same baseline: the check above can fail."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    proto = tmp_path / "protos/fdfo/worker/v1/worker.proto"
    text = proto.read_text()
    assert "uint64 round_id = 5;" in text
    proto.write_text(text.replace("uint64 round_id = 5;", "string round_id = 5;"))
    done = _buf("breaking", "--against", "protos/baseline.binpb", folder=tmp_path)
    assert done.returncode == 100
    assert "round_id" in done.stdout
