"""A plan as text, on one screen, and as files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.report import HeldBytes, MeasuredRun, check_output_folder, read_plan, read_run, render
from costmodels.errors import BadInput, PlanMismatch
from passes.plan import (
    Alternative,
    BlockPlan,
    ClusterInfo,
    CollectiveUse,
    Mesh,
    ModelInfo,
    Plan,
    Request,
    Schedule,
    SolverReport,
    Stage,
    StageMemory,
    TimeSplit,
    Workload,
    Zero,
)
from passes.schedules import SCHEDULES, rank_of, refusal

GIB = 2**30
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers", "reserved_overhead")


def memory(stage: int, *gib: float, limit_gib: float) -> StageMemory:
    sizes = [round(one * GIB) for one in gib]
    return StageMemory(stage, sum(sizes), round(limit_gib * GIB), **dict(zip(PARTS, sizes, strict=True)))


def sample_plan() -> Plan:
    """Llama-8B on 64 H100; the numbers are invented, and add up."""
    return Plan(
        status="optimal",
        model=ModelInfo("LlamaForCausalLM", 8_030_261_248, 8_030_261_248, "f00d"),
        cluster=ClusterInfo("8x8xh100", 64, 8, "h100-sxm-80"),
        workload=Workload(512, 8192, "bf16", "adamw"),
        mesh=Mesh(dp=16, tp=4),
        rank_order=("pp", "dp", "tp"),
        idle_devices=0,
        zero=Zero(1, 16),
        schedule=Schedule("none", 1, 32),
        stages=(
            Stage(
                blocks=(
                    BlockPlan("embed_tokens", 1, 0, "vocabulary over tp"),
                    BlockPlan("LlamaDecoderLayer", 32, 32, "heads and ffn over tp, norms along the sequence"),
                    BlockPlan("lm_head, loss", 1, 0, "vocabulary over tp"),
                ),
                recompute={"LlamaDecoderLayer": 32},
            ),
        ),
        step_time_s=4.12,
        tokens_per_s_per_device=15906.7,
        mfu=0.52,
        time_s=TimeSplit(compute=2.9252, tp_comm=0.5768, dp_comm=0.1648, recompute=0.3708, optimizer=0.0824),
        memory=(memory(0, 4.0, 8.0, 6.0, 33.9, 3.9, 2.3, 0.0, limit_gib=72.3),),
        solver=SolverReport("SCIP", "optimal", 4.12, 4.12, 0.0, 11.3, 1204, 1167, 12),
        alternatives=(
            Alternative(
                Mesh(dp=8, tp=8), Zero(1, 8), Schedule("none", 1, 64), "full", 4.248, 52 * GIB, "more tp communication"
            ),
            Alternative(
                Mesh(dp=64), Zero(3, 64), Schedule("none", 1, 8), "full", 4.318, 61 * GIB, "all-gathers not hidden"
            ),
            Alternative(
                Mesh(dp=32, tp=2), Zero(1, 32), Schedule("none", 1, 16), "none", 4.0, round(81.4 * GIB),
                "does not fit: 81.4 GiB",
            ),
        ),
        warnings=(),
        collectives=(
            CollectiveUse("all_gather", "tp", "layers.input_layernorm", 64 * 2**20, 2048, 0.21),
            CollectiveUse("reduce_scatter", "tp", "layers.o_proj", 64 * 2**20, 2048, 0.19),
            CollectiveUse("reduce_scatter", "dp", "gradients", 16 * GIB, 1, 0.1648),
        ),
        request=Request("hf:llama-8b/config.json", "8x8xh100", 512, 8192, "bf16", "adamw", {}, None),
    )  # fmt: skip


def mlp_plan() -> Plan:
    """A small model on CPUs: no sequence, an idle device, a warning, no proof."""
    return replace(
        sample_plan(),
        status="feasible",
        model=ModelInfo("MLP", 14_216, 13_000, "beef"),
        cluster=ClusterInfo("cpu:4", 4, 1, "cpu"),
        workload=Workload(12, None, "fp32", "sgd"),
        mesh=Mesh(dp=3),
        idle_devices=1,
        zero=Zero(0, 1),
        schedule=Schedule("none", 4, 1),
        stages=(Stage((BlockPlan("MLP", 1, 0, "whole on every device"),), {}),),
        step_time_s=0.000734,
        tokens_per_s_per_device=5449.6,
        mfu=0.0123,
        time_s=TimeSplit(compute=0.0007, dp_comm=0.000034),
        memory=(memory(0, 0.0001, 0.0001, 0, 0.00002, 0, 0, 0, limit_gib=60),),
        solver=SolverReport("SCIP", "feasible", 0.00074, 0.0007, 0.048, 0.21, 9, 2, 3),
        alternatives=(),
        warnings=("the batch has no sequence: tokens_per_s_per_device counts samples", "1 of 4 devices are idle"),
        collectives=(),
        request=Request("model.py:mlp", "cpu:4", 12, None, "fp32", "sgd", {}, None),
    )


def pipeline_plan() -> Plan:
    """Eight stages on four ranks of pp, and more of everything than a screen holds."""
    layers = (7, 8, 8, 8, 8, 8, 8, 6)
    stages = tuple(
        Stage(tuple(BlockPlan(f"kind_{i % 4}_{j}", n // 2, j, "heads and ffn over tp, " * 6) for j in range(4)), {})
        for i, n in enumerate(layers)
    )
    plan = sample_plan()
    without, *others = plan.alternatives
    pipelines = [Schedule("interleaved", 1, 128, 2), Schedule("interleaved", 2, 64, 4), Schedule("1f1b", 1, 128)]
    return replace(
        plan,
        mesh=Mesh(pp=4, dp=4, tp=4),
        zero=Zero(0, 1),
        schedule=Schedule("interleaved", 1, 128, 2),
        stages=stages,
        memory=tuple(memory(i, 1, 2, 3, 40 - i, 0, 0, 1, limit_gib=72) for i in range(4)),
        alternatives=(
            without,
            *(replace(without, mesh=Mesh(pp=4, dp=4, tp=4), zero=Zero(0, 1), schedule=one) for one in pipelines),
            *others * 5,
        ),
        warnings=tuple(f"warning {i}: " + "something to know about this plan, " * 8 for i in range(9)),
        collectives=plan.collectives * 7,
    )


def test_report_of_a_large_model(golden: Callable[[str, str], None]) -> None:
    golden("report_llama.txt", render(sample_plan()))


def ranks_of(plan: Plan, **changes: object) -> list[str]:
    """The grid of ranks."""
    text = render(replace(plan, **changes), blocks=True)  # type: ignore[arg-type]
    return [line[11:] for line in text.partition("\nranks ")[2].splitlines()]


def test_ranks_of_a_pipeline_say_which_stages_they_hold() -> None:
    zbv = Schedule("zbv", 1, 4, 2)
    assert ranks_of(sample_plan(), mesh=Mesh(pp=3, dp=1, tp=2), schedule=zbv)[1:] == [
        "pp 0  dp 0  stages 0, 5     0     1",
        "pp 1  dp 0  stages 1, 4     2     3",
        "pp 2  dp 0  stages 2, 3     4     5",
    ]


def test_ranks_run_along_the_last_axis_of_the_plan() -> None:
    inside = ranks_of(
        sample_plan(), mesh=Mesh(pp=2, dp=2, tp=2), rank_order=("dp", "pp", "tp"), schedule=Schedule("1f1b", 1, 4)
    )
    assert inside[1:] == [
        "dp 0  pp 0  stage 0     0     1",
        "dp 0  pp 1  stage 1     2     3",
        "dp 1  pp 0  stage 0     4     5",
        "dp 1  pp 1  stage 1     6     7",
    ]


def test_of_many_ranks_every_stage_is_shown_and_the_ends_of_dp() -> None:
    many = {"mesh": Mesh(pp=2, dp=16), "schedule": Schedule("1f1b", 1, 4)}
    assert ranks_of(sample_plan(), **many)[1:] == [
        "pp 0  dp 0   stage 0     0",
        "pp 0  ...              ...",
        "pp 0  dp 15  stage 0    15",
        "pp 1  dp 0   stage 1    16",
        "pp 1  ...              ...",
        "pp 1  dp 15  stage 1    31",
    ]
    assert ranks_of(sample_plan(), **many, rank_order=("dp", "pp", "tp"))[1:] == [
        "dp 0   pp 0  stage 0     0",
        "dp 0   pp 1  stage 1     1",
        "...                    ...",
        "dp 15  pp 0  stage 0    30",
        "dp 15  pp 1  stage 1    31",
    ]


@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_ranks_are_those_of_torch(name: str, virtual: int) -> None:
    if refusal(name, 3, virtual, 12):
        return
    places = [list(map(int, line.split()[5:-1])) for line in stages_of(name, virtual)]
    assert places == [[k for k, rank in enumerate(rank_of(name, 3, virtual)) if rank == place] for place in range(3)]


def stages_of(name: str, virtual: int) -> list[str]:
    grid = ranks_of(sample_plan(), mesh=Mesh(pp=3), schedule=Schedule(name, 1, 12, virtual))
    return [line.replace(",", "") for line in grid[1:]]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((8, 8, 8, 8), "stages 8, 8, 8, 8 layers"),
        ((1, *[2] * 30, 1), "stages 1, 30 x 2, 1 layers"),
        (tuple(1 + k % 3 for k in range(64)), "stages 1 to 3 layers"),
    ],
)
def test_layers_of_stages_are_one_line(layers: tuple[int, ...], said: str) -> None:
    stages = tuple(
        Stage((BlockPlan("Layer", n, 0, "whole"), BlockPlan("outside blocks", 0, 0, "")), {}) for n in layers
    )
    assert f"           {said}\n" in render(replace(sample_plan(), mesh=Mesh(pp=len(layers)), stages=stages))


def test_stages_without_layers_are_not_counted() -> None:
    stages = (Stage((BlockPlan("outside blocks", 0, 0, "whole"),), {}),) * 2
    assert "layers" not in render(replace(sample_plan(), stages=stages)).partition("blocks")[2].partition("proved")[0]


def test_report_with_blocks_shows_collectives_and_ranks(golden: Callable[[str, str], None]) -> None:
    golden("report_llama_blocks.txt", render(sample_plan(), blocks=True))


def test_report_without_a_sequence_counts_samples(golden: Callable[[str, str], None]) -> None:
    golden("report_mlp.txt", render(mlp_plan()))


def test_report_of_pipeline_stages_names_the_fullest(golden: Callable[[str, str], None]) -> None:
    golden("report_pipeline.txt", render(pipeline_plan()))


@pytest.mark.parametrize("plan", [sample_plan(), mlp_plan(), pipeline_plan()], ids=["llama", "mlp", "pipeline"])
def test_report_fits_one_screen_and_has_no_colour(plan: Plan) -> None:
    lines = render(plan).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in render(plan)


def test_colour_changes_nothing_but_colour() -> None:
    coloured = render(sample_plan(), colour=True)
    assert "\x1b[1m" in coloured
    assert coloured.replace("\x1b[1m", "").replace("\x1b[0m", "") == render(sample_plan())


@pytest.mark.parametrize("plan", [sample_plan(), mlp_plan()], ids=["llama", "mlp"])
def test_plan_comes_back_from_yaml_and_json(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(plan.to_json())
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    assert read_plan(tmp_path / "plan.json") == plan
    assert read_plan(tmp_path) == replace(plan, solver=replace(plan.solver, seconds=0.0))


def test_plan_of_another_version_is_refused_unless_it_is_only_shown(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(sample_plan().as_dict() | {"autopar": "0.0.9"}))
    with pytest.raises(PlanMismatch, match=r"made by autopar 0\.0\.9, this is"):
        read_plan(file)
    assert read_plan(file, any_version=True) == sample_plan()


@pytest.mark.parametrize(
    "text, said",
    [
        ("a: [", "neither YAML nor JSON, see line 1"),
        ("- 1", "expected a mapping"),
        ("a: 1", "it has no key 'autopar'"),
        ("autopar: 0.1.0", "status is missing"),
        ('{"autopar": "0.1.0", "status": 3}', "status is 3, not str"),
        ('{"autopar": "0.1.0", "status": "optimal", "model": 3}', "model is 3, not a mapping"),
    ],
)
def test_what_is_no_plan_is_named(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(BadInput, match=said):
        read_plan(file)


def test_a_run_stands_beside_what_was_predicted() -> None:
    plan = pipeline_plan()
    peaks = {one.stage: one.peak_bytes for one in plan.memory}
    fullest = max(peaks, key=lambda stage: peaks[stage])
    held = tuple(HeldBytes(stage, round(peak / 1.1), peak) for stage, peak in peaks.items())
    run = MeasuredRun(
        "2026-11-30T10:00:00+00:00", "NVIDIA H100", "2.13.0", 8, 3,
        plan.step_time_s / 0.8, plan.step_time_s, 2 * plan.step_time_s, held,
    )  # fmt: skip
    text = render(plan, measured=run)
    assert "(predicted -20.0 %)   median of 3 steps" in text
    assert f" on pp {fullest} (predicted +10.0 %)" in text
    assert "2026-11-30, 8 ranks on NVIDIA H100, torch 2.13.0" in text


def test_a_folder_without_a_run_has_none_and_another_file_is_named(tmp_path: Path) -> None:
    assert read_run(tmp_path) is None
    (tmp_path / "run.yaml").write_text("date: today\n")
    with pytest.raises(BadInput, match=r"run\.yaml: not what a program writes about its run: "):
        read_run(tmp_path)
    assert read_run(tmp_path / "run.yaml") is None  # only a plan's folder is looked at


def test_folder_with_files_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(BadInput, match=r"holds thesis\.tex"):
        check_output_folder(tmp_path)


def test_folder_with_half_an_output_is_left_alone_and_a_whole_one_is_not(tmp_path: Path) -> None:
    check_output_folder(tmp_path)
    (tmp_path / "program.py").touch()
    with pytest.raises(BadInput, match=r"has no plan\.yaml and program\.py"):
        check_output_folder(tmp_path)
    (tmp_path / "plan.yaml").touch()
    check_output_folder(tmp_path)


def test_file_where_a_folder_is_wanted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(BadInput, match="is a file"):
        check_output_folder(tmp_path / "out")
    with pytest.raises(BadInput, match="not a folder that you may write to"):
        check_output_folder(tmp_path / "out" / "below")
