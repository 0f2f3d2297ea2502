"""Every build of deploy/k8s, as a cluster of each version would check it."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest

from tests.deploy.manifests import BUILDS, MANIFESTS, OVERLAYS, build, of_kind, workloads

VERSIONS = ("1.31", "1.34", "1.37")
# Kinds of others, which the schemas of Kubernetes do not have.
FOREIGN = {
    ("monitoring.coreos.com/v1", "PodMonitor"),
    ("monitoring.coreos.com/v1", "PrometheusRule"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("gateway.networking.k8s.io/v1", "GRPCRoute"),
    ("cert-manager.io/v1", "Certificate"),
    ("cert-manager.io/v1", "Issuer"),
}


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Objects that have passed, so that none is checked twice."""
    return set()


@pytest.mark.parametrize("name", BUILDS)
def test_strict_schemas(name: str, valid: set[str]) -> None:
    """kustomize builds it without a warning, and each object passes the strict schema of each Kubernetes version."""
    for one in build(name):
        key = json.dumps({**one, "metadata": {**one["metadata"], "namespace": ""}})  # most are alike in all builds
        if (one["apiVersion"], one["kind"]) not in FOREIGN and key not in valid:
            for version in VERSIONS:
                assert kubernetes_validate.validate(one, version, strict=True) == version
            valid.add(key)


def test_a_misspelt_field_is_found() -> None:
    """The strict schemas refuse a field that does not exist, so the check above can fail."""
    deployment = dict(next(of_kind(build("overlays/dev-cpu"), "Deployment")))
    deployment["spec"] = {**deployment["spec"], "replica": 2}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


def test_all_overlays_components_and_jobs_are_built() -> None:
    """What is built here is every kustomization there is, but the base, which is a part of all."""
    kustomizations = {path.parent.relative_to(MANIFESTS) for path in MANIFESTS.rglob("kustomization.yaml")}
    assert {path.as_posix() for path in kustomizations if path.parts[0] not in ("base", "components")} <= set(BUILDS)
    used = "".join((MANIFESTS / "overlays" / name / "kustomization.yaml").read_text() for name in OVERLAYS)
    missing = {path.name for path in kustomizations if path.parts[0] == "components" and f"/{path}\n" not in used}
    assert missing == {"tls"}  # EXTRA


@pytest.mark.parametrize("name", BUILDS)
def test_pods_are_restricted(name: str) -> None:
    """Each container runs as 65532 without a right, on a file system it cannot write, as the namespace demands."""
    for workload in workloads(build(name)):
        pod, container = workload.spec["securityContext"], workload.container["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"], pod["runAsGroup"]) == (True, 65532, 65532)
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert workload.spec["enableServiceLinks"] is False
        assert workload.spec["automountServiceAccountToken"] is (workload.name == "openai-gateway")
        assert set(workload.container["resources"]["requests"]) == {"cpu", "memory"}
