"""Compile the FlashInfer kernels that the worker calls, with nvcc and without a GPU.

    FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=/some/folder python tools/compile_kernels.py

A worker that is started with the same two variables finds them and compiles nothing. Needs the extra `flashinfer`,
ninja and a CUDA toolkit (CUDA_HOME). Prints a JSON line for each module.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

HEAD_DIM = 128  # of all published checkpoints that docs/models.md lists for a GPU


def empty_libcuda(folder: Path) -> None:
    """What the linker asks for as -lcuda on a machine without a driver; the real one is loaded at run time."""
    import subprocess

    command = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(folder / "libcuda.so")]
    subprocess.run(command, check=True)


def main() -> int:
    import os

    try:
        import torch
        from flashinfer.jit.attention.modules import gen_batch_prefill_module
        from flashinfer.jit.page import gen_page_module
    except ImportError as error:
        print(f"compile_kernels: {error}; install the extra flashinfer", file=sys.stderr)
        return 2
    for name in ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_WORKSPACE_BASE"):
        if name not in os.environ:
            print(f"compile_kernels: set {name} (see the text of this file)", file=sys.stderr)
            return 2
    bf16 = torch.bfloat16
    modules = (
        gen_page_module(),
        gen_batch_prefill_module("fa2", bf16, bf16, bf16, torch.int32, HEAD_DIM, HEAD_DIM, 0, False, False, False),
    )
    with tempfile.TemporaryDirectory() as folder:
        empty_libcuda(Path(folder))
        paths = [folder, *filter(None, [os.environ.get("LIBRARY_PATH")])]
        os.environ["LIBRARY_PATH"] = os.pathsep.join(paths)
        for module in modules:
            start = time.perf_counter()
            module.build(verbose=False)
            seconds = round(time.perf_counter() - start, 1)
            library = Path(module.get_library_path())
            print(json.dumps({"module": module.name, "s": seconds, "bytes": library.stat().st_size}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
