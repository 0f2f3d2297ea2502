"""The commands and variables of the operators' page, held against the manifests."""

from __future__ import annotations

import re

from common.settings import flags_of
from scheduler_svc.settings import SchedulerSettings
from tests.deploy.manifests import BUILDS, MANIFESTS, OVERLAYS, build, find, workloads
from worker_svc.settings import WorkerSettings

TEXT = (MANIFESTS / "README.md").read_text()
SETTINGS = {"WORKER": WorkerSettings, "SCHEDULER": SchedulerSettings}


def command_blocks() -> list[list[str]]:
    return [block.splitlines() for block in re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S)]


def test_commands_build_what_is_there() -> None:
    """Each path behind -k or `kubectl kustomize` is a build; jobs get a namespace, and have none that forbids it."""
    lines = [line for block in command_blocks() for line in block]
    paths = [path for line in lines for path in re.findall(r"(?:-k|kustomize) deploy/k8s/(\S+)", line)]
    assert paths and set(paths) <= set(BUILDS)
    for line in lines:
        if "deploy/k8s/jobs/" in line:
            assert re.search(r"kubectl -n fdfo\S* apply ", line), line
    for name in BUILDS:
        if name.startswith("jobs/"):
            assert not any("namespace" in one["metadata"] for one in build(name))


def test_a_second_smoke_test_is_no_conflict() -> None:
    """A Job cannot be changed, so the page deletes the old one before each apply that may be a second one."""
    for block in command_blocks():
        for number, line in enumerate(block):
            if match := re.fullmatch(r"kubectl (-n \S+) apply -k deploy/k8s/jobs/smoke-test", line):
                assert block[number - 1] == f"kubectl {match[1]} delete job smoke-test --ignore-not-found"
    assert TEXT.count("apply -k deploy/k8s/jobs/smoke-test\n") >= 2


def test_variables_take_effect() -> None:
    """A variable that the page names is a setting, and no overlay has its flag, which would win."""
    args = [arg for name in OVERLAYS for one in workloads(build(f"overlays/{name}")) for arg in one.args]
    variables = re.findall(r"`FDFO_(WORKER|SCHEDULER)_(\w+)`", TEXT)
    assert variables
    for service, name in variables:
        flag = "--" + name.lower().replace("_", "-")
        assert flag in flags_of(SETTINGS[service])
        assert not any(arg.partition("=")[0] == flag for arg in args), flag


def test_the_other_version_is_the_one_that_is_served() -> None:
    """The download for v2 ends in the folder that v2 serves, that for v1 in v1's."""
    (old, new) = re.findall(r"jobs/model-download \| sed s/([^/]+)/([^/]+)/", TEXT)[0]
    (download,) = workloads(build("jobs/model-download"))
    (folder,) = [arg.partition("=")[2] for arg in download.args if arg.startswith("--local-dir=")]
    for version, path in (("v1", folder), ("v2", folder.replace(old, new))):
        for one in workloads(build(f"overlays/two-versions/{version}")):
            paths = [arg.partition("=")[2] for arg in one.args if arg.startswith("--model-path=")]
            assert one.name == "openai-gateway" or paths[-1] == path


def test_the_volume_for_several_nodes() -> None:
    """Overlays with pods on several nodes claim a volume that several nodes can have, as the page says."""
    modes = {
        name: find(build(f"overlays/{name}"), "PersistentVolumeClaim", "models")["spec"]["accessModes"]
        for name in OVERLAYS
        if name != "dev-cpu"
    }
    assert modes.pop("single-gpu") == ["ReadWriteOnce"]
    assert all(mode == ["ReadWriteMany"] for mode in modes.values())


def test_the_smoke_test_with_tls_trusts_the_schedulers() -> None:
    """It mounts the authority's certificate alone, of the Secret that the component makes, where its flag says."""
    (smoke,) = workloads(build("jobs/smoke-test-tls"))
    (path,) = [arg.partition("=")[2] for arg in smoke.args if arg.startswith("--tls-ca-file=")]
    secret = smoke.mounted(path)["secret"]
    certificate = find(build("tls on single-gpu"), "Certificate", "scheduler")["spec"]
    assert secret == {"secretName": certificate["secretName"], "items": [{"key": "ca.crt", "path": "ca.crt"}]}
    (target,) = [arg.partition("=")[2] for arg in smoke.args if arg.startswith("--target=")]
    assert target.removeprefix("dns:///").partition(":")[0] in certificate["dnsNames"]
