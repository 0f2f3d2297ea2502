"""From the objects that kustomize builds to pods that podman runs: the same image, arguments, configuration, user,
rights, limits and grace period. What podman does not know (probes, preStop, scheduling) is left out."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
Object = dict[str, Any]

POD_FIELDS = {"terminationGracePeriodSeconds", "securityContext", "containers", "volumes", "restartPolicy"}
CONTAINER_FIELDS = {"name", "image", "imagePullPolicy", "command", "args", "env", "resources", "securityContext"}


def kustomize(folder: str) -> list[Object]:
    """The objects of a folder under deploy/k8s."""
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", ROOT / "deploy/k8s" / folder], capture_output=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@dataclass(frozen=True)
class Workload:
    """A Deployment or Job. `names`: those of the Services that select its pods. `probes`: kind to service name."""

    name: str
    replicas: int
    template: Object
    names: tuple[str, ...]
    port: int
    probes: dict[str, str]
    config_maps: tuple[Object, ...]

    def pod(self, pod_name: str) -> str:
        """The YAML of a pod of this name. Volumes of podman have one name space, so each gets the pod's name too."""
        template = copy.deepcopy(self.template)
        spec = {key: value for key, value in template["spec"].items() if key in POD_FIELDS}
        maps = []
        for volume in spec.get("volumes", ()):
            volume["name"] = f"{pod_name}-{volume['name']}"
            if "configMap" in volume:
                (source,) = [one for one in self.config_maps if one["metadata"]["name"] == volume["configMap"]["name"]]
                own = {**source, "metadata": {"name": f"{pod_name}-{source['metadata']['name']}"}}
                volume["configMap"] = {"name": own["metadata"]["name"]}
                maps.append(own)
        containers = []
        for container in spec["containers"]:
            mounts = [{**one, "name": f"{pod_name}-{one['name']}"} for one in container.get("volumeMounts", ())]
            kept = {key: value for key, value in container.items() if key in CONTAINER_FIELDS}
            containers.append({**kept, "volumeMounts": mounts})
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": pod_name, "labels": template["metadata"]["labels"]},
            "spec": {**spec, "containers": containers},
        }
        return yaml.safe_dump_all([*maps, pod])

    @property
    def grace_s(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return int(self.template["spec"]["terminationGracePeriodSeconds"])


def workloads(objects: Iterable[Object]) -> dict[str, Workload]:
    """All Deployments and Jobs by name."""
    objects = list(objects)
    config_maps = tuple(one for one in objects if one["kind"] == "ConfigMap")
    found = {}
    for one in objects:
        if one["kind"] not in ("Deployment", "Job"):
            continue
        template = one["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        services = [other for other in objects if other["kind"] == "Service"]
        names = [other["metadata"]["name"] for other in services if other["spec"]["selector"].items() <= labels]
        (container,) = template["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        probes = {kind: container[kind]["grpc"]["service"] for kind in container if kind.endswith("Probe")}
        name, replicas = one["metadata"]["name"], one["spec"].get("replicas", 1)
        found[name] = Workload(name, replicas, template, tuple(names), ports.get("grpc", 0), probes, config_maps)
    return found
