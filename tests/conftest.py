"""What holds for all tests: one compute thread that does not spin, and property tests that repeat exactly."""

from __future__ import annotations

import os

# As in the Makefile, for a plain `pytest` too; before anything imports torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

# No deadline: two busy cores make any one example slow. Derandomized: the same examples on every run.
settings.register_profile("fdfo", deadline=None, derandomize=True)
settings.load_profile("fdfo")
