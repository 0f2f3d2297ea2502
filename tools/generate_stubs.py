"""Regenerate the stubs in fdfo/ from protos/ with the pinned old grpcio-tools (`make protos`).

Old on purpose: generated code runs under protobuf and grpcio of its own version and newer, never older. The tools go
into a folder of their own inside the environment, so that their protobuf 6 does not replace the environment's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TOOLS = ["grpcio-tools==1.76.0", "protobuf==6.31.1"]
TOOLS_FOLDER = Path(sys.prefix) / "protoc"


class StubsError(Exception):
    """The tools could not be installed or would not run; the message has their output."""


def install_tools() -> None:
    """Install the pinned tools unless they are there."""
    stamp = TOOLS_FOLDER / "installed.txt"
    wanted = "\n".join(TOOLS)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    shutil.rmtree(TOOLS_FOLDER, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(TOOLS_FOLDER)]
    _run([*pip, *TOOLS])
    stamp.write_text(wanted)


def generate(out: Path) -> None:
    """Write the stubs of all protos under `out`, in their package folders. Raises StubsError."""
    install_tools()
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    _run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outputs, *files],
        environment={**os.environ, "PYTHONPATH": str(TOOLS_FOLDER)},
    )


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StubsError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    try:
        generate(ROOT)
    except StubsError as error:
        sys.exit(str(error))
