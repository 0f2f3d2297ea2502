"""Compile the kernels that the worker calls without a GPU: FlashInfer's with nvcc, and its own with Triton.

    FLASHINFER_CUDA_ARCH_LIST=9.0a FLASHINFER_WORKSPACE_BASE=/some/folder python tools/compile_kernels.py

A worker that is started with the same two variables, where ninja and nvcc are, finds them and compiles nothing. Needs
the extra `flashinfer`, ninja and a CUDA toolkit (CUDA_HOME). Prints a JSON line for each module. Triton compiles in a
second, again where the worker runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HEAD_DIM = 128  # of all published checkpoints that docs/models.md lists for a GPU


def empty_libcuda(folder: Path) -> None:
    """What the linker asks for as -lcuda on a machine without a driver; the real one is loaded at run time."""
    command = ["cc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(folder / "libcuda.so")]
    subprocess.run(command, check=True)


def compile_triton(architecture: int) -> dict[str, object]:
    """The kernel of greedy steps, for bf16 logits with a penalty."""
    start = time.perf_counter()
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        return {"module": "greedy_kernel", "skipped": str(error)}
    from worker_svc.algorithms import greedy_kernel

    pointers = {"logits": "*bf16", "previous": "*i64", "penalty": "*fp32", "tokens": "*i64", "probabilities": "*fp32"}
    numbers = dict.fromkeys(("vocab_size", "block_size", "mask_token_id"), "i32")
    constants = {"HAS_PENALTY": True, "TILE": greedy_kernel.TILE}
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=greedy_kernel._best, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    seconds = round(time.perf_counter() - start, 1)
    return {"module": "greedy_kernel", "s": seconds, "bytes": len(compiled.asm["cubin"])}


def main() -> int:
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
    print(
        json.dumps(compile_triton(int(float(os.environ["FLASHINFER_CUDA_ARCH_LIST"].rstrip("abf")) * 10))), flush=True
    )
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
