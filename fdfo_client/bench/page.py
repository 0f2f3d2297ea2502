"""A report as one HTML page that needs nothing else: no script, no font, no file, no network."""

from __future__ import annotations

import dataclasses

from fdfo_client.bench.metrics import ServerFigures, Spread, Summary, definitions
from fdfo_client.bench.plots import plots
from fdfo_client.bench.report import Report, headline, notes, number

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>fdfo {{ report.command }}: {{ headline }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 70em; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .2em 1em .2em 0; border-bottom: 1px solid #ddd; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.d { color: #555; } code { overflow-wrap: anywhere; }
.note { background: #fff3cd; padding: .4em .8em; }
.plots { display: flex; flex-wrap: wrap; gap: 1em; } figure { margin: 0; width: 31em; }
figcaption { color: #555; } figcaption b { color: #222; }
svg { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>fdfo {{ report.command }}: {{ headline }}</h1>
{% for note in notes %}<p class="note">{{ note }}</p>
{% endfor %}
<h2>Latencies</h2>
<table>
<tr><th>figure</th>{% for name in ("samples", "mean", "p50", "p95", "p99") %}<th class="n">{{ name }}</th>{% endfor %}\
<th>definition</th></tr>
{% for name, value, definition in spreads %}<tr><td>{{ name }}</td><td class="n">{{ value.count }}</td>\
{% for part in (value.mean, value.p50, value.p95, value.p99) %}<td class="n">{{ part | number }}</td>{% endfor %}\
<td class="d">{{ definition }}</td></tr>
{% endfor %}</table>
<div class="plots">
{% for plot in plots %}<figure><figcaption><b>{{ plot.caption }}</b><br>{{ plot.definition }}</figcaption>\
{{ plot.svg | safe }}</figure>
{% endfor %}</div>
{% for title, rows in tables %}<h2>{{ title }}</h2>
<table>
{% for name, value, definition in rows %}<tr><td>{{ name }}</td><td class="n">{{ value | number }}</td>\
<td class="d">{{ definition }}</td></tr>
{% endfor %}</table>
{% endfor %}
{% if report.summary.errors %}<h2>Errors</h2>
<table>
{% for error, count in report.summary.errors.items() %}<tr><td class="n">{{ count }}</td><td>{{ error }}</td></tr>
{% endfor %}</table>
{% endif %}
<h2>Settings</h2>
<table>
{% for name, value in report.settings.items() %}<tr><td>{{ name }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}</table>
{% for target, facts in servers %}<h2>Server {{ target }}</h2>
<table>
{% for name, value in facts.items() %}<tr><td>{{ name }}</td><td><code>{{ value }}</code></td></tr>
{% endfor %}</table>
{% endfor %}
</body>
</html>
"""

_SERVER_FACTS = (
    "served_model_name",
    "version",
    "scheduler_id",
    "fingerprint",
    "block_size",
    "num_tokens",
    "context_length",
    "algorithm",
    "fdfo",
    "rounds_in_flight",
    "max_queued_requests",
)


def render(report: Report) -> str:
    """The page."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = number
    rows = list(_rows(report.summary))
    tables = [("Requests", [row for row in rows if isinstance(row[1], int | float)])]
    if report.summary.server is not None:
        tables.append(("Server", list(_rows(report.summary.server))))
    servers = []
    for target, info in report.servers.items():
        facts = {name: getattr(info, name) for name in _SERVER_FACTS}
        facts |= {
            f"worker {worker.target}": f"{worker.max_rows} rows, {worker.pages_total} KV pages"
            for worker in info.workers
        }
        servers.append((target, facts))
    return environment.from_string(_PAGE).render(
        report=report,
        headline=headline(report),
        notes=list(notes(report)),
        spreads=[row for row in rows if isinstance(row[1], Spread)],
        plots=plots(report),
        tables=tables,
        servers=servers,
    )


def _rows(figures: Summary | ServerFigures) -> list[tuple[str, object, str]]:
    """Name, value and definition of each figure."""
    texts = definitions(type(figures))
    return [(field.name, getattr(figures, field.name), texts[field.name]) for field in dataclasses.fields(figures)]
