"""What a rollout, a slow start and the memory in use may take."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import BUILDS, build, find, of_kind, workloads

OVERLAYS = tuple(name for name in BUILDS if not name.startswith("jobs/"))
UNITS = {"Mi": 2**20, "Gi": 2**30}
LOAD_S = 600  # of a large model from a network volume
IDLE_SCHEDULER_BYTES = 150e6  # at most; tests/e2e/test_metrics.py measures it


def bytes_of(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_rollout_takes_no_scheduler_away(name: str) -> None:
    """Those that clients are told of stay until new ones are ready; workers go first, as there is no spare device."""
    objects = build(name)
    rolling = {
        one["metadata"]["name"]: one["spec"]["strategy"]["rollingUpdate"] for one in of_kind(objects, "Deployment")
    }
    assert rolling.pop("worker") == {"maxUnavailable": 1, "maxSurge": 0}
    assert all(one["maxUnavailable"] == 0 and one["maxSurge"] >= 1 for one in rolling.values())
    for service in rolling:
        assert find(objects, "PodDisruptionBudget", service)["spec"]["minAvailable"] >= 1
    assert find(objects, "PodDisruptionBudget", "worker")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("name", BUILDS)
def test_memory_is_enough(name: str) -> None:
    """All have a limit with room above the request, and a scheduler's request covers what it has without load."""
    for one in workloads(build(name)):
        resources = one.container["resources"]
        request, limit = (bytes_of(resources[kind]["memory"]) for kind in ("requests", "limits"))
        assert limit >= 2 * request, one.name
        assert one.name != "scheduler" or request >= IDLE_SCHEDULER_BYTES


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_worker_has_time_to_load(name: str) -> None:
    """No probe ends a worker before ten minutes, nor a scheduler before a minute."""
    for one in workloads(build(name)):
        probe = one.container["startupProbe"]
        start_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert start_s >= (LOAD_S if one.name == "worker" else 60)
