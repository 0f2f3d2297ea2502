"""What the objects of deploy/k8s say of each other and of the programs that they start."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.utils._auth
import pytest
from smg.launch_router import parse_router_args

from common import __version__
from common.health_probe import ProbeSettings
from common.settings import build_parser as flag_parser
from common.settings import flags_of, settings_from
from fdfo_client.cli import build_parser
from scheduler_svc.__main__ import LAST_MESSAGES_S
from scheduler_svc.config_files import read_algorithm_params
from scheduler_svc.server import SERVICE_NAME as SCHEDULER_NAME
from scheduler_svc.settings import NAME_PREFIX, SchedulerSettings, split_target
from tests.deploy.manifests import BUILDS, ROOT, Object, Workload, build, find, of_kind, selects, workloads
from worker_svc.server import SERVICE_NAME as WORKER_NAME
from worker_svc.service import DRAIN_GRACE_S, DRAIN_LINGER_S
from worker_svc.settings import WorkerSettings

SERVICES = {"scheduler": (SchedulerSettings, SCHEDULER_NAME), "worker": (WorkerSettings, WORKER_NAME)}
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
OVERLAYS = tuple(name for name in BUILDS if not name.startswith("jobs/"))


def settings_of(workload: Workload) -> SchedulerSettings | WorkerSettings:
    """Its args, read by the parser that reads them in the pod."""
    cls: Any = SERVICES[workload.name][0]
    settings = settings_from(cls, flag_parser(cls, workload.name, "").parse_args(workload.args))
    assert isinstance(settings, SchedulerSettings | WorkerSettings)
    return settings


def services_of(name: str) -> Iterator[Workload]:
    return (one for one in workloads(build(name)) if one.name in SERVICES)


def selectors(one: Object) -> Iterator[Object]:
    """All selectors of pods of this namespace in an object."""
    spec = one["spec"]
    match one["kind"]:
        case "Service":
            yield {"matchLabels": spec["selector"]}
        case "Deployment":
            yield spec["selector"]
            for constraint in spec["template"]["spec"].get("topologySpreadConstraints", ()):
                yield constraint["labelSelector"]
        case "NetworkPolicy":
            peers = [
                peer
                for direction in ("ingress", "egress")
                for rule in spec.get(direction, ())
                for peer in rule.get("from", []) + rule.get("to", [])
            ]
            for selector in (spec["podSelector"], *(peer["podSelector"] for peer in peers if "podSelector" in peer)):
                if selector not in ({}, {"matchLabels": {"fdfo.dev/client": "true"}}):  # all; pods of users
                    yield selector
        case _:
            yield spec["selector"]


@pytest.mark.parametrize("name", BUILDS)
def test_selectors_find_pods(name: str) -> None:
    """Every selector of a Service, Deployment, budget, policy or monitor takes pods that are there."""
    objects = build(name)
    pods = [workload.labels for workload in workloads(objects)]
    for one in of_kind(objects, "Service", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for selector in selectors(one):
            assert any(selects(selector, labels) for labels in pods), (one["kind"], one["metadata"]["name"], selector)


@pytest.mark.parametrize("name", OVERLAYS)
def test_ports(name: str) -> None:
    """Services, policies and monitors name ports of the pods they select; probes ask a port that the pod listens on."""
    objects = build(name)
    deployments = workloads(objects)

    def ports_of(selector: Object) -> set[str]:
        return set.intersection(*(set(one.ports) for one in deployments if selects(selector, one.labels)))

    for one in of_kind(objects, "Service"):
        assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports_of(next(selectors(one)))
    for one in of_kind(objects, "PodMonitor"):
        assert {point["port"] for point in one["spec"]["podMetricsEndpoints"]} <= ports_of(one["spec"]["selector"])
    for one in of_kind(objects, "NetworkPolicy"):
        for rule in one["spec"].get("ingress", ()):
            assert {port["port"] for port in rule["ports"]} <= ports_of(one["spec"]["podSelector"])
        for rule in one["spec"].get("egress", ()):
            names = {port["port"] for port in rule["ports"] if isinstance(port["port"], str)}
            assert names <= set().union(*(ports_of(peer["podSelector"]) for peer in rule.get("to", ())))
    for pod in deployments:
        for probe in (pod.container[kind] for kind in PROBES):
            if "httpGet" in probe:
                assert probe["httpGet"]["port"] in pod.ports
            elif "grpc" in probe:
                assert probe["grpc"]["port"] in pod.ports.values()
    for pod in services_of(name):
        settings = settings_of(pod)
        metrics = {"metrics": settings.metrics_port} if settings.metrics_port is not None else {}
        assert pod.ports == {"grpc": settings.port, **metrics}
        assert settings.host == "0.0.0.0"


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_name_services_that_health_knows(name: str) -> None:
    """Readiness asks for the service by its own name, liveness for the process; exec probes parse, with our TLS."""
    for one in services_of(name):
        asked = {}
        for kind in PROBES:
            probe = one.container[kind]
            assert probe["timeoutSeconds"] > 1
            if "exec" in probe:
                program, *words = probe["exec"]["command"]
                assert [program, *words[:2]] == ["python3", "-m", "common.health_probe"]
                settings = settings_from(ProbeSettings, flag_parser(ProbeSettings, "", "").parse_args(words[2:]))
                assert settings.target == f"127.0.0.1:{one.ports['grpc']}"
                assert settings.timeout_s < probe["timeoutSeconds"]
                assert settings.tls_ca_file and settings.tls_cert_file == settings_of(one).tls_cert_file
                asked[kind] = settings.service
            else:
                assert settings_of(one).tls_cert_file is None
                asked[kind] = probe["grpc"]["service"]
        assert asked["readinessProbe"] == SERVICES[one.name][1]
        assert asked["livenessProbe"] == ""
        assert asked["startupProbe"] in ("", SERVICES[one.name][1])


@pytest.mark.parametrize("name", OVERLAYS)
def test_schedulers_look_for_the_workers_service(name: str) -> None:
    """--workers is the headless Service of the workers and its port; both serve one model, from one path."""
    objects = build(name)
    scheduler, worker = sorted(services_of(name), key=lambda one: one.name)
    of_scheduler, of_worker = settings_of(scheduler), settings_of(worker)
    assert isinstance(of_scheduler, SchedulerSettings)
    assert of_scheduler.workers.startswith(NAME_PREFIX)
    host, port = split_target(of_scheduler.workers.removeprefix(NAME_PREFIX))
    service = find(objects, "Service", host)["spec"]
    assert service["clusterIP"] == "None"
    assert [one["port"] for one in service["ports"]] == [port] == [worker.ports["grpc"]]  # headless: no translation
    assert selects({"matchLabels": service["selector"]}, worker.labels)
    assert of_scheduler.model_path == of_worker.model_path


@pytest.mark.parametrize("name", OVERLAYS)
def test_files_that_flags_name_are_mounted(name: str) -> None:
    """Each path in args lies in a ConfigMap, Secret or volume that the pod mounts, or in the image."""
    objects = build(name)
    secrets = {one["spec"]["secretName"] for one in of_kind(objects, "Certificate")}
    for one in services_of(name):
        for path in re.findall(r"=(/\S+)", " ".join(one.args)):
            if path.startswith("/opt/fdfo/"):  # test_images.py holds it against the Dockerfiles
                continue
            volume = one.mounted(path)
            if "configMap" in volume:
                assert Path(path).name in find(objects, "ConfigMap", volume["configMap"]["name"])["data"]
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
                assert Path(path).name in ("tls.crt", "tls.key", "ca.crt")
            else:
                assert find(objects, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_config_files_are_read_by_their_reader(tmp_path: Path) -> None:
    """What stands in the ConfigMap is what --dllm-algorithm-config takes."""
    for name in OVERLAYS:
        (config,) = [one for one in of_kind(build(name), "ConfigMap") if "scheduler-config" in one["metadata"]["name"]]
        assert set(config["data"]) == {"algorithm.yaml"}
        (tmp_path / "algorithm.yaml").write_text(config["data"]["algorithm.yaml"])
        read_algorithm_params(tmp_path / "algorithm.yaml")


def test_args_of_other_programs() -> None:
    """The gateway's args and the smoke test's are read by their own parsers, and name what is there."""
    objects = build("overlays/multi-gpu")
    (gateway,) = [one for one in workloads(objects) if one.name == "openai-gateway"]
    (scheduler,) = [one for one in workloads(objects) if one.name == "scheduler"]
    router = parse_router_args(gateway.args)
    assert selects({"matchLabels": router.selector}, scheduler.labels)
    assert router.service_discovery and router.service_discovery_port == scheduler.ports["grpc"]
    assert {"http": router.port, "metrics": router.prometheus_port} == gateway.ports
    settings = settings_of(scheduler)
    assert isinstance(settings, SchedulerSettings) and settings.vllm_grpc and settings.tls_cert_file is None

    (smoke,) = workloads(build("jobs/smoke-test"))
    assert smoke.container["command"] == ["fdfo"]
    (target,) = build_parser(["generate"]).parse_args(smoke.args).target
    host, port = split_target(target.removeprefix(NAME_PREFIX))
    service = find(objects, "Service", host)
    assert (port, service["spec"]["clusterIP"]) == (service["spec"]["ports"][0]["port"], "None")


@pytest.mark.parametrize("name", BUILDS)
def test_environment(name: str) -> None:
    """Variables in args are set; Hugging Face's package reads those with its prefix; those with ours are settings."""
    hugging_face = inspect.getsource(huggingface_hub.constants) + inspect.getsource(huggingface_hub.utils._auth)
    for one in workloads(build(name)):
        names = {variable["name"] for variable in one.container.get("env", ())}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(one.args))) <= names
        assert all(f'"{variable}"' in hugging_face for variable in names if variable.startswith("HF_"))
        known = flags_of(SERVICES[one.name][0]) if one.name in SERVICES else set()
        prefix = f"FDFO_{one.name.upper()}_"
        ours = {variable for variable in names if variable.startswith("FDFO_")}
        assert {"--" + name.removeprefix(prefix).lower().replace("_", "-") for name in ours} <= known


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_grace_period_is_longer_than_a_drain(name: str) -> None:
    """Kubernetes kills no pod that still drains as its flags say."""
    for one in workloads(build(name)):
        grace_s = one.spec["terminationGracePeriodSeconds"]
        sleep_s = one.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        if one.name == "openai-gateway":
            drain_s = parse_router_args(one.args).shutdown_grace_period_secs
        else:
            settings = settings_of(one)
            if isinstance(settings, SchedulerSettings):
                drain_s = settings.stop_grace_s + LAST_MESSAGES_S
                assert sleep_s > 0
            else:
                drain_s = DRAIN_LINGER_S + DRAIN_GRACE_S
        assert sleep_s + drain_s + 5 <= grace_s


@pytest.mark.parametrize("name", BUILDS)
def test_images_and_versions(name: str) -> None:
    """All images are ours, of this version, and have a Dockerfile; the label says the version too."""
    for one in workloads(build(name)):
        image, _, tag = one.container["image"].partition(":")
        assert tag == __version__
        service = image.removeprefix("fdfo-").removesuffix("-cpu").removesuffix("-cuda")
        assert (ROOT / "deploy/docker" / f"{service}.Dockerfile").exists(), image
        assert one.labels.get("app.kubernetes.io/version", __version__) == __version__


@pytest.mark.parametrize("name", ["overlays/multi-gpu", "overlays/two-versions/v1", "overlays/two-versions/v2"])
def test_what_scales_and_routes_exists(name: str) -> None:
    """Scalers, routes and rights name objects of their own namespace; scaled Deployments have no fixed number."""
    objects = build(name)
    (namespace,) = [one["metadata"]["name"] for one in of_kind(objects, "Namespace")]
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in of_kind(objects, "ScaledObject")}
    assert scaled == {"scheduler", "worker"}
    for target in scaled:
        assert "replicas" not in find(objects, "Deployment", target)["spec"]
    (route,) = of_kind(objects, "GRPCRoute")
    for rule in route["spec"]["rules"]:
        assert [match["method"]["service"] for match in rule["matches"]] == [SCHEDULER_NAME]
        for backend in rule["backendRefs"]:
            service = find(objects, "Service", backend["name"])
            assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    (binding,) = of_kind(objects, "RoleBinding")
    find(objects, binding["roleRef"]["kind"], binding["roleRef"]["name"])
    for subject in binding["subjects"]:
        assert (subject["namespace"], find(objects, "ServiceAccount", subject["name"]) != {}) == (namespace, True)
    for one in objects:
        assert one["metadata"].get("namespace", namespace) == namespace
    accounts = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    assert {one.spec["serviceAccountName"] for one in workloads(objects)} == accounts


def test_two_versions_share_nothing() -> None:
    """The two versions of a model have namespaces, models and host names of their own."""
    first, second = build("overlays/two-versions/v1"), build("overlays/two-versions/v2")
    hosts = [next(of_kind(objects, "GRPCRoute"))["spec"]["hostnames"] for objects in (first, second)]
    assert not set(hosts[0]) & set(hosts[1])
    models = [
        {settings_of(one).model_path for one in services_of(f"overlays/two-versions/{version}")}
        for version in ("v1", "v2")
    ]
    assert len(models[0]) == len(models[1]) == 1 and models[0] != models[1]


def test_certificates_have_the_names_that_are_used() -> None:
    """Each issuer exists, each mounted Secret is made, and the workers' name is the one that schedulers expect."""
    objects = build("tls on single-gpu")
    certificates = list(of_kind(objects, "Certificate"))
    made = {one["spec"]["secretName"]: one["spec"].get("dnsNames", []) for one in certificates}
    for one in certificates:
        find(objects, "Issuer", one["spec"]["issuerRef"]["name"])
    for one in of_kind(objects, "Issuer"):
        assert one["spec"].get("ca", {}).get("secretName", "authority-tls") in made
    scheduler, worker = sorted(services_of("tls on single-gpu"), key=lambda one: one.name)
    of_scheduler = settings_of(scheduler)
    assert isinstance(of_scheduler, SchedulerSettings)
    secret = worker.mounted(str(settings_of(worker).tls_cert_file))["secret"]["secretName"]
    assert of_scheduler.worker_tls_server_name in made[secret]
    names = made[scheduler.mounted(str(of_scheduler.tls_cert_file))["secret"]["secretName"]]
    for service in ("scheduler", "scheduler-headless"):
        assert {service, f"{service}.fdfo", f"{service}.fdfo.svc"} <= set(names)
