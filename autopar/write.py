"""Writes a plan's folder: it appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from costmodels.errors import BadInput
from passes.plan import Plan

OURS = frozenset(("plan.yaml", "program.py", "buffers.pt", "run.yaml", "__pycache__"))


def write_output(folder: Path, plan: Plan, program: str, buffers: Mapping[str, torch.Tensor]) -> None:
    """plan.yaml, program.py and, where there are any, buffers.pt.

    Raises BadInput where the folder holds something that is not ours, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or {p.name for p in folder.iterdir()} - OURS):
        raise BadInput(f"{folder} holds other files; choose a new or empty folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error.strerror}") from None
    try:
        (fresh / "plan.yaml").write_text(plan.to_yaml())
        (fresh / "program.py").write_text(program)
        if buffers:
            torch.save({name: b.contiguous() for name, b in buffers.items()}, fresh / "buffers.pt")
        fresh.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
