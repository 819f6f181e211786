"""Describe your cluster, keep your model: autopar plans its parallel training and writes the program."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.job import Job, parallelize
    from costmodels.cluster import Cluster
    from costmodels.errors import AutoparError, BadInput, CaptureError, NoPlanFits, PlanMismatch
    from passes.plan import Plan

_HOMES = {
    "AutoparError": "costmodels.errors",
    "BadInput": "costmodels.errors",
    "CaptureError": "costmodels.errors",
    "Cluster": "costmodels.cluster",
    "Job": "autopar.job",
    "NoPlanFits": "costmodels.errors",
    "Plan": "passes.plan",
    "PlanMismatch": "costmodels.errors",
    "parallelize": "autopar.job",
}

__all__ = [
    "AutoparError",
    "BadInput",
    "CaptureError",
    "Cluster",
    "Job",
    "NoPlanFits",
    "Plan",
    "PlanMismatch",
    "parallelize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
