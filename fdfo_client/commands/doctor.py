"""`fdfo doctor`: checks an installation, line by line, and says what to do."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from fdfo_client._access import Access, access_from
from fdfo_client._arguments import typed
from fdfo_client._channel import parse_targets
from fdfo_client._waiting import waiting
from fdfo_client.commands.flags import DEFAULT_TARGET, add_target
from fdfo_client.doctor import device, installation, model, ports, services
from fdfo_client.doctor.finding import Finding, fail, ok, warn
from fdfo_client.serve import default_model_path

PORTS = (50051, 50052)
TIMEOUT_S = 5.0
PORT_TIMEOUT_S = 1.0

EXAMPLES = f"""\
It looks at Python and packages, the processor and torch, the model folder and its memory, the ports
{PORTS[0]} and {PORTS[1]} here, and the schedulers and workers that are named; without --target at a scheduler that
answers at {DEFAULT_TARGET}.

examples:
  fdfo doctor
  fdfo doctor --model-path /models/LLaDA2.0-mini --device cuda
  fdfo doctor --target a:50051,b:50051 --workers gpu1:50052,gpu2:50052
  fdfo doctor --target a:50051 --tls-ca-file ca.crt --api-key-file key --json

The exit status is 1 when a line says FAIL; WARN changes nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `fdfo doctor`."""
    parser.description = "Check an installation: a line for each thing looked at, with what to do."
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--model-path", type=Path, metavar="DIR", help=f"folder of the model ({default_model_path()}, if there)"
    )
    parser.add_argument(
        "--device",
        type=typed(device.name),
        default="cpu",
        metavar="DEVICE",
        help="where a worker is to run: cpu, cuda or cuda:N (cpu)",
    )
    add_target(parser)
    parser.set_defaults(target=())
    parser.add_argument(
        "--workers", type=typed(parse_targets), default=(), metavar="HOST:PORT,...", help="workers, asked directly"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON with all findings")


def main(arguments: argparse.Namespace) -> int:
    """`fdfo doctor`."""
    access, found = access_from(arguments), []
    for finding in _findings(arguments, access):
        found.append(finding)
        if not arguments.json:
            print("\n".join(_lines(finding)), flush=True)
    is_ok = all(finding.level != "FAIL" for finding in found)
    if arguments.json:
        print(json.dumps({"ok": is_ok, "findings": [dataclasses.asdict(finding) for finding in found]}))
    return 0 if is_ok else 1


def _lines(finding: Finding) -> Iterator[str]:
    yield f"{finding.level:<5} {finding.what}: {finding.found}"
    if finding.advice:
        yield f"      -> {finding.advice}"


def _findings(arguments: argparse.Namespace, access: Access) -> Iterator[Finding]:
    yield from installation.check()
    yield _clock()
    yield from device.check_cpu(os.environ, device.num_usable_cpus())
    with waiting("looking at torch"):
        torch = device.look_at_torch()
    yield from device.check_torch(torch, arguments.device)
    findings, fingerprint = _model(arguments, torch)
    yield from findings
    yield from _services(arguments, access, fingerprint)


def _clock() -> Finding:
    """Ours cannot be before the day on which this file was written."""
    written_at = Path(__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < written_at - 24 * 3600:
        return fail("clock", f"{now} is before this was installed", "set it by NTP: certificates and logs depend on it")
    return ok("clock", now)


def _model(arguments: argparse.Namespace, torch: device.Torch | None) -> tuple[list[Finding], str | None]:
    path = arguments.model_path or default_model_path()
    if arguments.model_path is None and not path.is_dir():
        return [ok("model", "no folder given; --model-path names one")], None
    if importlib.util.find_spec("tokenizers") is None:
        return [warn(f"model {path}", "not looked at without the extra", "pip install 'fdfo[scheduler]'")], None
    if arguments.device == "cpu":
        free_bytes = device.free_memory_bytes()
    else:
        cuda = device.cuda_device(torch, arguments.device)
        free_bytes = None if cuda is None else cuda.free_bytes
    with waiting(f"reading {path}"):
        return model.check(path, free_bytes, arguments.device)


def _services(arguments: argparse.Namespace, access: Access, fingerprint: str | None) -> Iterator[Finding]:
    here = [f"127.0.0.1:{port}" for port in PORTS]
    with waiting("asking at the ports"):
        looks = services.look_at_all(here, access, PORT_TIMEOUT_S)
    for port, look in zip(PORTS, looks, strict=True):
        yield ports.check_port(port, look.kind)
    targets = arguments.target or [look.target for look in looks[:1] if look.kind == "a scheduler"]
    named = [*targets, *arguments.workers]
    with waiting(f"asking {', '.join(named)}"):
        looks = services.look_at_all(named, access, TIMEOUT_S)
    version = installation.installed_version(installation.DISTRIBUTION)
    if arguments.model_path is None and looks and looks[0].info is not None:
        fingerprint = looks[0].info.fingerprint  # nobody said that the folder that ships is to be served
    for look in looks[: len(targets)]:
        yield from services.check_scheduler(look, fingerprint, version)
    for look in looks[len(targets) :]:
        yield from services.check_worker(look, fingerprint, version)
