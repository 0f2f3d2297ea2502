"""Every build of deploy/k8s, as a cluster of each version would check it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.deploy.foreign_kinds import SPECS, schema_of
from tests.deploy.manifests import BUILDS, MANIFESTS, OVERLAYS, Object, build, of_kind, workloads

VERSIONS = ("1.31", "1.34", "1.37")


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Objects that have passed, so that none is checked twice."""
    return set()


@pytest.mark.parametrize("name", BUILDS)
def test_strict_schemas(name: str, valid: set[str]) -> None:
    """kustomize builds it without a warning, and each object passes the strict schema of each Kubernetes version, or
    that of its own kind."""
    for one in build(name):
        key = json.dumps({**one, "metadata": {**one["metadata"], "namespace": ""}})  # most are alike in all builds
        if key in valid:
            continue
        if (one["apiVersion"], one["kind"]) in SPECS:
            jsonschema.validate(one, schema_of(one["apiVersion"], one["kind"]))
        else:
            for version in VERSIONS:
                assert kubernetes_validate.validate(one, version, strict=True) == version
        valid.add(key)


def test_a_misspelt_field_is_found() -> None:
    """The strict schemas refuse a field that does not exist, so the check above can fail."""
    deployment = dict(next(of_kind(build("overlays/dev-cpu"), "Deployment")))
    deployment["spec"] = {**deployment["spec"], "replica": 2}
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


def mappings(value: Any) -> Iterator[dict[str, Any]]:
    """All mappings in a value but those whose keys are free."""
    if isinstance(value, list):
        for item in value:
            yield from mappings(item)
    elif isinstance(value, dict):
        yield value
        for key, item in value.items():
            if key not in ("labels", "matchLabels", "annotations"):
                yield from mappings(item)


@pytest.mark.parametrize("kind", sorted(SPECS), ids="/".join)
def test_a_misspelt_field_of_a_foreign_kind_is_found(kind: tuple[str, str]) -> None:
    """Wherever a key of these objects is misspelt, their schema refuses it."""
    validator = jsonschema.Draft202012Validator(schema_of(*kind))
    objects = [one for name in ("overlays/multi-gpu", "tls on single-gpu") for one in build(name)]
    found: list[Object] = [copy.deepcopy(one) for one in objects if (one["apiVersion"], one["kind"]) == kind]
    assert found
    for one in found:
        assert validator.is_valid(one)
        for mapping in list(mappings(one)):
            for key in list(mapping):
                mapping[key + "x"] = mapping.pop(key)
                assert not validator.is_valid(one), (one["metadata"]["name"], key)
                mapping[key] = mapping.pop(key + "x")


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
