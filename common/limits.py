"""Limits that both services must agree on."""

from __future__ import annotations

# Stop token ids that a request may name; on the worker the model's own come on top.
MAX_REQUEST_STOP_TOKEN_IDS = 64
MAX_ROW_STOP_TOKEN_IDS = 96
