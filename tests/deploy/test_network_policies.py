"""Who may connect to whom: the rules of the NetworkPolicies, applied as Kubernetes does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.deploy.manifests import BUILDS, Object, Workload, build, of_kind, selects, workloads

OVERLAYS = tuple(name for name in BUILDS if not name.startswith("jobs/"))
CLIENT = {"fdfo.dev/client": "true"}


@dataclass(frozen=True)
class Peer:
    """A pod at the other end. `namespace`: the labels of its namespace; None: it is in ours."""

    labels: Mapping[str, str]
    namespace: Mapping[str, str] | None = None


def of_namespace(name: str) -> Peer:
    return Peer({}, {"kubernetes.io/metadata.name": name})


DNS, INTERNET = of_namespace("kube-system"), of_namespace("outside")
DIRECTIONS = {"Ingress": ("ingress", "from"), "Egress": ("egress", "to")}


def takes(rule: Object, peer: Peer) -> bool:
    """Whether one entry of `from` or `to` means this peer."""
    assert rule.keys() <= {"podSelector", "namespaceSelector"}
    if "namespaceSelector" not in rule:
        return peer.namespace is None and selects(rule["podSelector"], peer.labels)
    in_namespace = peer.namespace is not None and selects(rule["namespaceSelector"], peer.namespace)
    return in_namespace and selects(rule.get("podSelector", {}), peer.labels)


def allowed(
    objects: tuple[Object, ...],
    direction: str,
    labels: Mapping[str, str],
    peer: Peer,
    port: str | int,
    protocol: str = "TCP",
) -> bool:
    """Whether a pod with these labels may be connected to by, or connect to, a peer; all is where no policy speaks."""
    rules, peers = DIRECTIONS[direction]
    policies = [
        one["spec"]
        for one in of_kind(objects, "NetworkPolicy")
        if direction in one["spec"]["policyTypes"] and selects(one["spec"]["podSelector"], labels)
    ]
    return not policies or any(
        (peers not in rule or any(takes(entry, peer) for entry in rule[peers]))
        and {"protocol": protocol, "port": port} in rule["ports"]
        for policy in policies
        for rule in policy.get(rules, ())
    )


def connects(objects: tuple[Object, ...], source: Mapping[str, str], target: Workload, port: str) -> bool:
    """Whether a pod of the namespace reaches another one: both ends must let it."""
    out = allowed(objects, "Egress", source, Peer(target.labels), port)
    return out and allowed(objects, "Ingress", target.labels, Peer(source), port)


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_must_connect_can(name: str) -> None:
    """All ask the DNS; schedulers reach workers, clients and gateways reach schedulers, Prometheus the metrics."""
    objects = build(name)
    pods = {one.name: one for one in workloads(objects)}
    scheduler, worker, gateway = pods["scheduler"], pods["worker"], pods.get("openai-gateway")
    for one in pods.values():
        assert all(allowed(objects, "Egress", one.labels, DNS, 53, protocol) for protocol in ("UDP", "TCP"))
    assert connects(objects, scheduler.labels, worker, "grpc")
    assert connects(objects, CLIENT, scheduler, "grpc")
    assert allowed(objects, "Ingress", scheduler.labels, Peer({}, CLIENT), "grpc")
    for one in (scheduler, worker):
        if "metrics" in one.ports:
            assert allowed(objects, "Ingress", one.labels, of_namespace("monitoring"), "metrics")
    for route in of_kind(objects, "GRPCRoute"):
        (parent,) = route["spec"]["parentRefs"]
        assert allowed(objects, "Ingress", scheduler.labels, of_namespace(parent["namespace"]), "grpc")
    if gateway is not None:
        assert connects(objects, gateway.labels, scheduler, "grpc")
        assert allowed(objects, "Ingress", gateway.labels, Peer(CLIENT), "http")
        assert all(allowed(objects, "Egress", gateway.labels, INTERNET, port) for port in (443, 6443))  # its API


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_need_not_connect_cannot(name: str) -> None:
    """Nobody but schedulers reaches workers, strangers reach nothing, and no service reaches the outside."""
    objects = build(name)
    pods = {one.name: one for one in workloads(objects)}
    strangers = (Peer({}), of_namespace("default"))
    for one in pods.values():
        for port in one.ports:
            assert not any(allowed(objects, "Ingress", one.labels, peer, port) for peer in strangers)
    worker = pods["worker"]
    for peer in (Peer(CLIENT), Peer({}, CLIENT), of_namespace("gateways"), Peer(worker.labels)):
        assert not allowed(objects, "Ingress", worker.labels, peer, "grpc")
    for service in ("scheduler", "worker"):
        assert not allowed(objects, "Egress", pods[service].labels, INTERNET, 443)


def test_jobs_can_do_their_work() -> None:
    """The smoke test reaches the DNS and the schedulers, the download the DNS and the internet."""
    objects = build("overlays/dev-cpu")
    (scheduler,) = [one for one in workloads(objects) if one.name == "scheduler"]
    (smoke,), (download,) = workloads(build("jobs/smoke-test")), workloads(build("jobs/model-download"))
    assert connects(objects, smoke.labels, scheduler, "grpc")
    assert allowed(objects + build("jobs/model-download"), "Egress", download.labels, INTERNET, 443)
    for one in (smoke, download):
        assert allowed(objects, "Egress", one.labels, DNS, 53, "UDP")
