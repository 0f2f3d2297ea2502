"""The algorithms a worker knows, by name. A new one is one file here and one entry below
(docs/adding-an-algorithm.md)."""

from __future__ import annotations

from worker_svc.algorithms.base import DllmAlgorithm
from worker_svc.algorithms.joint_threshold import JointThreshold
from worker_svc.algorithms.low_confidence import LowConfidence

ALGORITHMS: dict[str, DllmAlgorithm] = {
    LowConfidence.name: LowConfidence(),
    JointThreshold.name: JointThreshold(),
}
