"""The processor, what the environment says to OpenMP, and what torch sees; torch is loaded in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fdfo_client.commands.words import size
from fdfo_client.doctor.finding import Finding, fail, ok, warn

LOOK_TIMEOUT_S = 120.0
# Values that let OpenMP's threads spin while they wait.
SPINNING = {"OMP_WAIT_POLICY": ("ACTIVE",), "KMP_BLOCKTIME": ("INFINITE",), "GOMP_SPINCOUNT": ("INFINITE", "INFINITY")}

LOOK = """
import json, torch
devices = []
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        devices.append({"name": torch.cuda.get_device_name(index), "free_bytes": free, "total_bytes": total})
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": devices}))
"""


@dataclass(frozen=True)
class CudaDevice:
    """As torch sees it now."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Torch:
    """`cuda`: the version that it was built for, None for a build without. `error`: why it does not load."""

    version: str = ""
    cuda: str | None = None
    devices: tuple[CudaDevice, ...] = ()
    error: str = ""


def name(text: str) -> str:
    """A device's name, as a worker's --device takes it. Raises ValueError."""
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text):
        raise ValueError(f"{text!r} is not cpu, cuda or cuda:N")
    return text


def look_at_torch() -> Torch | None:
    """None where it is not installed. Takes seconds."""
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=LOOK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Torch(error=f"not loaded after {LOOK_TIMEOUT_S:g} s")
    if done.returncode != 0:
        return Torch(error=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    seen = json.loads(done.stdout.splitlines()[-1])
    return Torch(seen["version"], seen["cuda"], tuple(CudaDevice(**device) for device in seen["devices"]))


def check_cpu(environment: Mapping[str, str], num_cpus: int) -> Iterator[Finding]:
    """`num_cpus`: that this process may use."""
    yield ok("cpu", f"{num_cpus} usable")
    for variable, values in SPINNING.items():
        if environment.get(variable, "").upper() in values:
            yield warn(
                "threads",
                f"{variable}={environment[variable]} lets OpenMP threads spin; they take the CPU from all others",
                f"unset {variable}; the services set OMP_WAIT_POLICY=PASSIVE themselves",
            )
            return
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > num_cpus:
        yield warn("threads", f"OMP_NUM_THREADS={threads} on {num_cpus} CPUs", "unset it, or give at most as many")
        return
    yield ok("threads", f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set; --num-threads says")


def check_torch(torch: Torch | None, device: str) -> Iterator[Finding]:
    """`device`: that a worker is to use, as its --device has it."""
    wants_cuda = device != "cpu"
    if torch is None:
        text = "not installed; only a worker needs it"
        yield warn("torch", text, "pip install 'fdfo[worker]'") if wants_cuda else ok("torch", text)
        return
    if torch.error:
        yield fail("torch", f"does not load: {torch.error}", "pip install --force-reinstall torch")
        return
    yield ok("torch", f"{torch.version}, {f'for CUDA {torch.cuda}' if torch.cuda else 'built without CUDA'}")
    for index, one in enumerate(torch.devices):
        yield ok(f"cuda:{index}", f"{one.name}, {size(one.free_bytes)} free of {size(one.total_bytes)}")
    if wants_cuda and cuda_device(torch, device) is None:
        yield fail(
            device,
            f"torch sees {len(torch.devices)} CUDA devices",
            "nvidia-smi tells whether the driver sees it; --device cpu works without"
            if torch.cuda
            else "install a torch that is built for CUDA, or use --device cpu",
        )


def cuda_device(torch: Torch | None, device: str) -> CudaDevice | None:
    """The device of a name such as cuda or cuda:1; None where there is none."""
    index = int(device.partition(":")[2] or 0)
    return torch.devices[index] if torch is not None and index < len(torch.devices) else None


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Memory of the processor that this process can still take: the machine's, or less where a control group has a
    limit. None where the system does not tell."""
    free: list[int] = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max" is no limit
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / file).read_text()) for file in ("memory.max", "memory.current"))
        free.append(max(limit - used, 0))
    return min(free, default=None)


def num_usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
