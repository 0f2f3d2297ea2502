"""Alerts, dashboard and scalers: their queries are PromQL over series that the services have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import MANIFESTS, OVERLAYS, ROOT, build, find, of_kind

MONITORING = MANIFESTS / "components" / "monitoring"
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
    names = re.findall(r"\b((?:fdfo|grpc|process)_\w+)(?=[{\[) ]|$)", query)
    return {re.sub(r"(_seconds|_forwards)_(bucket|sum|count)$", r"\1", name) for name in names}


def test_series_are_documented() -> None:
    """Every series in a rule, a panel or a scaler stands in docs/metrics.md, which is held against live scrapes."""
    page = set(re.findall(r"`(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    queries = [rule["expr"] for rule in rules()] + panel_queries() + [query for query, _ in scaler_queries()]
    for query in queries:
        assert series_of(query), query
        assert series_of(query) <= page, query


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
