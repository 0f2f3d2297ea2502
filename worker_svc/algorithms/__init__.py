"""The algorithms a worker knows, by name. A new one is one file here and one entry below
(docs/adding-an-algorithm.md)."""

from __future__ import annotations

from worker_svc.algorithms.base import DllmAlgorithm
from worker_svc.algorithms.entropy_bounded import EntropyBounded
from worker_svc.algorithms.hierarchy_block import HierarchyBlock
from worker_svc.algorithms.joint_threshold import JointThreshold
from worker_svc.algorithms.low_confidence import LowConfidence
from worker_svc.algorithms.scheduled import LowConfidenceDynamic, LowConfidenceStatic, Sequential

ALGORITHMS: dict[str, DllmAlgorithm] = {
    LowConfidence.name: LowConfidence(),
    JointThreshold.name: JointThreshold(),
    LowConfidenceDynamic.name: LowConfidenceDynamic(),
    LowConfidenceStatic.name: LowConfidenceStatic(),
    Sequential.name: Sequential(),
    EntropyBounded.name: EntropyBounded(),
    HierarchyBlock.name: HierarchyBlock(),
}


def algorithms_for(logit_shift: int) -> dict[str, DllmAlgorithm]:
    """Those that can run on a model: with shifted logits none that edits, as nothing there speaks of position 0."""
    return {name: algorithm for name, algorithm in ALGORITHMS.items() if not (logit_shift and algorithm.edits)}
