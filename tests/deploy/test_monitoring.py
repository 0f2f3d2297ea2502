"""Alerts, dashboard and scalers: their queries are PromQL over series that the services have."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from common import call_metrics
from fdfo.scheduler.v1.scheduler_pb2 import DESCRIPTOR
from scheduler_svc import metrics as scheduler_metrics
from scheduler_svc.__main__ import ENGINE_NAME
from scheduler_svc.server import SERVICE_NAME as SCHEDULER_NAME
from tests.deploy.manifests import MANIFESTS, OVERLAYS, ROOT, build, find, of_kind
from worker_svc import metrics as worker_metrics

MONITORING = MANIFESTS / "components" / "monitoring"
FROM_SCRAPES = {"namespace", "pod", "le"}  # what Prometheus and its operator add to labels of ours
GROUPING = r"\b(?:by|on) \(([^)]*)\)"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: install Debian's package prometheus"
)


def rules() -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
    return content


def panel_queries() -> list[str]:
    """Of all panels, with what Grafana puts in for its variables."""
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [query.replace("$namespace", ".*").replace("$__rate_interval", "1m") for query in queries]


def scaler_queries() -> Iterator[tuple[str, str]]:
    """Each with the namespace that its object is in."""
    for name in OVERLAYS:
        for one in of_kind(build(f"overlays/{name}"), "ScaledObject"):
            for trigger in one["spec"]["triggers"]:
                if trigger["type"] == "prometheus":
                    yield trigger["metadata"]["query"], one["metadata"]["namespace"]


def series_of(query: str) -> set[str]:
    """The names of the series in a query; those of a histogram without their ending."""
    query = re.sub(GROUPING, "", query)
    names = re.findall(r"\b((?:fdfo|grpc|process)_\w+)(?=[{\[) ]|$)", query)
    return {re.sub(r"(_seconds|_forwards)_(bucket|sum|count)$", r"\1", name) for name in names}


def groups_of(query: str) -> set[str]:
    """The labels that it groups or joins by."""
    return {label for labels in re.findall(GROUPING, query) for label in re.findall(r"\w+", labels)}


def test_series_are_documented() -> None:
    """Every series in a rule, a panel or a scaler stands in docs/metrics.md, which is held against live scrapes."""
    page = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    queries = [rule["expr"] for rule in rules()] + panel_queries() + [query for query, _ in scaler_queries()]
    for query in queries:
        assert series_of(query), query
        assert series_of(query) <= page, query


def labels_on_the_page() -> dict[str, tuple[set[str], set[str]]]:
    """By the name of a series: its labels, and the words in backticks of its meaning, where the values stand."""
    rows = re.findall(
        r"^\| `(\w+)` \| \w+ \| ([^|]*) \| [^|]* \| (.*) \|$", (ROOT / "docs/metrics.md").read_text(), re.M
    )
    words = {name: [set(re.findall(r"`(\w+)`", cell)) for cell in cells] for name, *cells in rows}
    return {name: (labels, meaning) for name, (labels, meaning) in words.items()}


def values_of(series: str, label: str, page: set[str]) -> set[str]:
    """What the code gives a label: names of gRPC, or words of the page that the module of the series has too."""
    match label:
        case "grpc_code":
            return set(call_metrics._CODE_NAMES.values())
        case "grpc_service":
            return {SCHEDULER_NAME, ENGINE_NAME}
        case "grpc_method":
            return set(DESCRIPTOR.services_by_name[SCHEDULER_NAME.rpartition(".")[2]].methods_by_name)
        case _:
            module = scheduler_metrics if series.startswith("fdfo_scheduler_") else worker_metrics
            return page & set(re.findall(r'"(\w+)"', inspect.getsource(module)))


def test_labels_are_those_of_the_series() -> None:
    """Queries pick labels and values that their series have, group by labels that are there, and show what they group
    by: a wrong one finds nothing, and nobody is told."""
    page = labels_on_the_page()
    shown = [(rule["expr"], " ".join(rule["annotations"].values())) for rule in rules()]
    panels = dashboard()["panels"]
    shown += [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]
    shown += [(query, "") for query, _ in scaler_queries()]
    for query, text in shown:
        there = FROM_SCRAPES.union(*(page[name][0] for name in series_of(query)))
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", query):
            (series,) = series_of(name)
            labels, words = page[series]
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
                assert label in labels | {"namespace"}, query
                if label != "namespace":
                    assert set(values.split("|")) <= values_of(series, label, words), query
        assert groups_of(query) <= there, query
        result = query.partition("\nand ")[0]  # what comes after picks among its series
        visible = groups_of(result) if "by (" in result else there
        assert set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text)) <= visible, (query, text)


def test_scalers_count_their_own_namespace() -> None:
    """A scaler of one version of a model does not see what waits for another."""
    queries = list(scaler_queries())
    assert len(queries) == 9  # three in each overlay that scales
    for query, namespace in queries:
        assert re.findall(r'namespace="([^"]*)"', query) == [namespace]


def test_each_namespace_has_an_alert_for_its_schedulers() -> None:
    """Where two versions of a model run, the schedulers of one do not hide that the other's are gone."""
    for name in OVERLAYS:
        for one in of_kind(build(f"overlays/{name}"), "PrometheusRule"):
            (query,) = [rule["expr"] for rule in one["spec"]["groups"][0]["rules"] if "absent" in rule["expr"]]
            assert re.findall(r'namespace="([^"]*)"', query) == [one["metadata"]["namespace"]]


def test_every_alert_has_a_runbook() -> None:
    """Its annotation leads to a paragraph of the page for operators, and the page has no other."""
    headings = re.findall(r"^### (Fdfo\w+)$", (MANIFESTS / "README.md").read_text(), re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook"] == f"deploy/k8s/README.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_dashboard_is_found_by_grafana() -> None:
    """The ConfigMap has the usual label and the dashboard unchanged; panels have ids of their own and lie apart."""
    config = find(build("overlays/single-gpu"), "ConfigMap", "fdfo-dashboard")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["fdfo.json"]) == dashboard()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len({str(panel["gridPos"]) for panel in panels}) == len(panels)


@needs_promtool
def test_promtool_takes_rules_and_queries(tmp_path: Path) -> None:
    """promtool finds no fault in the alerts, nor in the queries of panels and scalers."""
    queries = panel_queries() + [query for query, _ in scaler_queries()]
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    group = {"name": "all", "rules": [*rules(), *recorded]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [group]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, text=True)
    assert f"SUCCESS: {len(group['rules'])} rules found" in done.stdout, done.stderr
    assert done.returncode == 0


@needs_promtool
def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    """On series where all is well no alert fires, on series where nothing is each of them does."""
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "fdfo", "rules": rules()}]}))
    case = (Path(__file__).parent / "alerts.yaml").read_text()
    for rule in rules():
        assert case.count(rule["alert"]) == 2
    (tmp_path / "test.yaml").write_text(case.replace("RULES", "rules.yaml"))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
