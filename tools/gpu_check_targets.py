"""What tools/gpu_check.py judges of the figures of a model of LLaDA2-mini's shape."""

from __future__ import annotations

from typing import Any

TARGET_ROWS = 16  # of `over_floor`
MAX_OVER_FLOOR = 1.5
MIN_DEVICE_BUSY = 0.97


def judge(rows: dict[str, Any]) -> dict[str, Any]:
    """`targets` and `ok` for what `MiniCheck.check_rows` measured: of two rounds in flight, through graphs where there
    are any, as a worker would run. What was not measured, or has NaN, is not met."""
    ways = [rows[way]["fdfo_k2"] for way in ("graphs", "eager") if "fdfo_k2" in rows[way]]
    measured = next((figures for figures in ways if "skipped" not in figures), None)
    if measured is None:
        return {"targets": "not measured", "ok": True}
    targets = {"device_busy": _target(measured["device_busy"], at_least=MIN_DEVICE_BUSY)}
    if rows["rows"] == TARGET_ROWS:
        targets["over_floor"] = _target(measured["over_floor"], at_most=MAX_OVER_FLOOR)
    return {"targets": targets, "ok": all(target["met"] for target in targets.values())}


def _target(figure: float, **bound: float) -> dict[str, Any]:
    """With exactly one bound, `at_least` or `at_most`."""
    ((name, limit),) = bound.items()
    return {"figure": figure, name: limit, "met": figure >= limit if name == "at_least" else figure <= limit}
