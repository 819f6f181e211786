"""Measuring a machine: what is timed, what is made of it, and the file that comes out."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autopar import calibrate as calibration
from autopar import timing
from autopar.calibrate import calibrate, groups
from autopar.cli import main
from autopar.report import read_plan
from autopar.runtime import mesh
from costmodels.cluster import Cluster
from costmodels.collectives import collective_seconds
from costmodels.errors import BadInput
from costmodels.groups import Collective, Group
from costmodels.operators import OperatorClass
from costmodels.profile import Profile
from passes.plan import Plan

QUICK_TIMING = {"ROUNDS": 1, "FEW_ROUNDS": 1, "ROUND_S": 0.001, "LONG_S": 0.001}
QUICK_LINKS = {"SIZES": (4096, 65536), "OVERLAPPED_BYTES": 65536}


def quick(world: int) -> Profile:
    with patch.multiple(timing, **QUICK_TIMING), patch.multiple(calibration, **QUICK_LINKS):
        return calibrate(Cluster.preset(f"cpu:{world}"))


def test_every_kind_of_group_is_measured_once() -> None:
    assert groups(Cluster.preset("cpu:4")) == {Group(2, 1, 2): (2, 1), Group(4, 1, 1): (4, 1)}
    found = groups(Cluster.preset("2x8xh100"))
    assert found[Group(8, 2, 1)] == (16, 1)  # all
    assert found[Group(1, 2, 8)] == (2, 8)  # one of each node
    assert found[Group(4, 2, 2)] == (8, 2)
    assert all(size * stride <= 16 for size, stride in found.values())


def test_two_ranks_agree_on_one_profile(gloo) -> None:
    first, second = gloo.run(2, quick, 2)
    assert replace(first, date="") == replace(second, date="")
    assert (first.device, first.backend, first.ranks) == ("cpu", "gloo", 2)
    assert first.processor_share is not None and 0 < first.processor_share <= 1
    assert first.concurrent is not None and first.concurrent >= 1
    measured = {(one.operator, one.dtype) for one in first.operators}
    assert {(kind, dtype) for kind in OperatorClass for dtype in ("bf16", "fp32")} - measured == {
        (OperatorClass.VIEW, "bf16"), (OperatorClass.VIEW, "fp32"), (OperatorClass.OPTIMIZER, "bf16"),
    }  # fmt: skip
    assert all(one.flop_per_s is not None for one in first.operators if one.operator is OperatorClass.MATMUL)
    assert {sweep.kind for sweep in first.collectives} == set(Collective) - {Collective.BROADCAST}
    assert all(sweep.bytes == (4096, 65536) and min(sweep.seconds) > 0 for sweep in first.collectives)
    assert first.overlap_slowdown is not None and first.overlap_slowdown >= 1
    assert first.launch_s is None  # on a CPU every operator has it in its fixed time
    least = min(one.fixed_s for one in first.operators if one.operator is not OperatorClass.OPTIMIZER)
    assert 1e-6 < least < 1e-3
    assert first.unit_s is not None and 0 <= first.unit_s < 0.1
    cluster = Cluster.preset("cpu:2").with_profile(first)
    sweep = next(one for one in first.collectives if one.kind is Collective.ALL_GATHER)
    taken = [collective_seconds(Collective.ALL_GATHER, size, sweep.group, cluster) for size in sweep.bytes]
    assert taken == pytest.approx(sweep.seconds) or taken == pytest.approx([math.sqrt(math.prod(sweep.seconds))] * 2)


def test_a_message_to_the_next_rank_is_timed_over_every_hop(gloo) -> None:
    """In a group of several nodes some hop is between two of them, wherever these begin."""
    assert gloo.run(4, hops) == [(1, [1]), (2, [1, 1]), (2, [1, 1]), (1, [1])]


def hops() -> tuple[int, list[int]]:
    """Transfers of this rank, and how far each goes."""
    mesh.init({"axis": 4}, "cpu")
    own = dist.get_rank()
    with patch.object(dist, "batch_isend_irecv", side_effect=dist.batch_isend_irecv) as posted:
        calibration._action(Collective.SEND, 16, 4, torch.device("cpu"))()
    (ops,) = posted.call_args.args
    return len(ops), [abs(op.peer - own) for op in ops]


def test_processes_that_are_not_as_many_as_the_devices_are_refused() -> None:
    with pytest.raises(BadInput, match="cpu:4 has 4 devices, 1 process was started: torchrun --nproc-per-node 4 -m"):
        calibrate(Cluster.preset("cpu:4"))


# -- the command ------------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def model():
    return Model(), {"x": torch.randn(64, 64)}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where there is a model, and a cluster that has what the profile says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.yaml").write_text("{devices_per_node: 2, device: cpu, profile: mine.yaml}")
    return tmp_path


def plan(cluster: str, fix: str = "dp=2,zero=0,microbatches=1") -> Plan:
    words = f"plan model.py:model --precision fp32 --fix {fix} --out out --cluster"
    assert main([*words.split(), cluster]) == 0
    return read_plan(Path("out"))


def test_a_measured_step_is_what_the_same_plan_then_predicts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = plan("cpu:2")
    assert "times are catalogue priors, not calibrated on this cluster" in before.warnings
    measured = 3 * before.step_time_s
    assert main(["calibrate", "--out", "mine.yaml", "--from-step", "out", "--measured", str(measured)]) == 0
    after = plan("cluster.yaml")
    assert after.mesh == before.mesh and after.step_time_s == pytest.approx(measured, rel=0.01)
    assert "compute x" in after.cluster.profile and not any("not calibrated" in one for one in after.warnings)
    capsys.readouterr()
    assert main(["show", "out"]) == 0
    assert f"times by {after.cluster.profile}" in capsys.readouterr().out
    # once more, from a plan that has the factor already
    assert main(["calibrate", "--out", "mine.yaml", "--from-step", "out", "--measured", str(measured / 2)]) == 0
    assert plan("cluster.yaml").step_time_s == pytest.approx(measured / 2, rel=0.01)


def test_a_measured_step_of_sharded_parameters(folder: Path) -> None:
    """Copies and hooks of fully_shard are compute, and grow with it."""
    before = plan("cpu:2", "dp=2,zero=2,microbatches=2")
    assert (
        main(["calibrate", "--out", "mine.yaml", "--from-step", "out", "--measured", str(4 * before.step_time_s)]) == 0
    )
    assert plan("cluster.yaml", "dp=2,zero=2,microbatches=2").step_time_s == pytest.approx(
        4 * before.step_time_s, rel=0.02
    )


def test_a_profile_of_a_busy_machine_or_of_one_process_is_doubted(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = Cluster.preset("cpu:2").device
    one = Profile("cpu", "x", "2026-11-30", "x", "gloo", 1, 0.99, name="mine.yaml")
    alone = "mine.yaml was measured on one process, which has all cores; 2 share them"
    busy = "mine.yaml had 61 % of the processor time that it asked for: others ran, or cores lack"
    assert one.doubts(cpu, 1, 1) == () and one.doubts(Cluster.preset("8xh100").device, 8, 8) == ()
    assert one.doubts(cpu, 2, 2) == (alone,)
    assert replace(one, ranks=2, processor_share=0.61).doubts(cpu, 2, 2) == (busy,)
    few = replace(one, ranks=4, processor_share=0.49, concurrent=2)  # two cores for four: no more is to be had
    assert few.lent(4, 4) == 2 and few.doubts(cpu, 4, 4) == ()
    assert replace(few, processor_share=0.3).doubts(cpu, 4, 4) == (busy.replace("61", "30"),)
    assert few.lent(2, 2) == 1  # of fewer processes than were measured nothing is known
    (folder / "mine.yaml").write_text(replace(one, processor_share=0.61).to_yaml("0.1.0"))
    assert {alone, busy} <= set(plan("cluster.yaml").warnings)
    monkeypatch.setattr(calibration, "calibrate", lambda *asked: replace(one, processor_share=0.61))
    assert main(["calibrate", "--out", "mine.yaml", "--cluster", "cpu:1"]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == f"autopar: warning: {busy}"


def test_a_step_measured_by_the_program_itself_is_taken(folder: Path) -> None:
    seconds = 2 * plan("cpu:2").step_time_s
    run = {
        "date": "2026-11-30", "device": "cpu", "torch": "2.13.0", "ranks": 2, "steps": 8,
        "step_time_s": seconds, "fastest_step_s": seconds, "slowest_step_s": seconds,
    }  # fmt: skip
    Path("out/run.yaml").write_text(json.dumps(run))
    assert main(["calibrate", "--out", "mine.yaml", "--from-step", "out"]) == 0
    assert plan("cluster.yaml").step_time_s == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("calibrate", "calibrate needs --out FILE"),
        ("calibrate --out nowhere/p.yaml", "there is no folder nowhere"),
        ("calibrate --out .", "is a folder"),
        ("calibrate --out p.yaml --measured 2", "--measured belongs to --from-step PLAN"),
        ("calibrate --out p.yaml --from-step out", "--from-step needs --measured SECONDS"),
        ("calibrate --out p.yaml --from-step out --measured -1", "expected a positive number of seconds"),
        ("calibrate --out p.yaml --from-step out --measured 1e-9", "in communication alone"),
        ("calibrate --out p.yaml --from-step out --measured 1 --cluster cpu:2", "leave it out beside --from-step"),
        ("calibrate --out mine.yaml --from-step out --measured 1", "plan again first"),
        ("calibrate --out p.yaml --cluster 8xh100", "8xh100 has 8 devices, 1 process was started"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], words: str, sentence: str
) -> None:
    plan("cpu:2")
    (folder / "mine.yaml").write_text(Profile("cpu", "x", "2026-11-30", "x", "gloo", 2).to_yaml("0.1.0"))
    before = sorted(folder.iterdir()), (folder / "mine.yaml").read_text()
    capsys.readouterr()
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert before == (sorted(folder.iterdir()), (folder / "mine.yaml").read_text())


@pytest.mark.slow
@pytest.mark.timeout(400)  # a minute where nothing else runs
def test_torchrun_measures_every_process(folder: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autopar", "calibrate", "--out", "mine.yaml"]
    subprocess.run([sys.executable, *words], check=True, timeout=300)
    profile = Profile.from_yaml("mine.yaml")
    assert profile.ranks == 2 and len(profile.collectives) == 5
    assert plan("cluster.yaml").cluster.profile == str(profile)
