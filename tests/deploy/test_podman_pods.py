"""What `make k8s-run` makes of the manifests for podman, without podman."""

from __future__ import annotations

import yaml

from tools.k8s_run.pods import Object, Workload, kustomize, workloads


def pod_of(workload: Workload) -> tuple[list[Object], Object]:
    """The ConfigMaps, and the pod `x`."""
    *maps, pod = yaml.safe_load_all(workload.pod("x"))
    return maps, pod


def test_pods_are_those_of_the_overlay() -> None:
    """Image, arguments, user, rights, limits, mounts, grace period are the Deployment's; volumes are renamed."""
    found = workloads(kustomize("overlays/dev-cpu"))
    assert {name: one.replicas for name, one in found.items()} == {"scheduler": 2, "worker": 2}
    for one in found.values():
        _, pod = pod_of(one)
        spec = pod["spec"]
        (ours,), (theirs,) = spec["containers"], one.template["spec"]["containers"]
        for key in ("image", "args", "env", "resources", "securityContext"):
            assert ours[key] == theirs[key]
        assert [mount["mountPath"] for mount in ours["volumeMounts"]] == [
            mount["mountPath"] for mount in theirs["volumeMounts"]
        ]
        assert {mount["name"] for mount in ours["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert spec["securityContext"] == one.template["spec"]["securityContext"]
        assert spec["terminationGracePeriodSeconds"] == one.grace_s
        assert "ports" not in ours


def test_names_and_configuration_follow_the_services() -> None:
    """A pod gets the names of the Services that select it, and a copy of the ConfigMap that it mounts."""
    found = workloads(kustomize("overlays/dev-cpu"))
    assert set(found["scheduler"].names) == {"scheduler", "scheduler-headless"}
    assert found["worker"].names == ("worker",)
    (config,), pod = pod_of(found["scheduler"])
    assert config["data"] and config["metadata"] in [
        {"name": volume["configMap"]["name"]} for volume in pod["spec"]["volumes"] if "configMap" in volume
    ]
    assert pod_of(found["worker"])[0] == []
    assert found["scheduler"].probes["readinessProbe"] == "fdfo.scheduler.v1.SchedulerService"
