"""The command line: what each command does, and what is said, and left behind, when it cannot."""

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from autopar import cli
from autopar.cli import main, parse_fix
from autopar.report import render
from autopar.verify import Difference, Step, Verification, without_dropout
from costmodels.errors import AutoparError, BadInput, CaptureError, NoPlanFits
from passes.plan import FIX_KEYS, BlockPlan, Mesh, ModelInfo, Plan, Stage
from test_report import mlp_plan

ROOT = Path(__file__).parent.parent
TARGET = """
import torch
def mlp():
    print("a word of the user's")
    return torch.nn.Linear(24, 8), {"x": torch.ones(12, 24), "y": torch.ones(12, 8)}, lambda out, batch: out.sum()
def nothing():
    return None
"""


@dataclass
class Compiler:
    """Stands in for the compiler: gives one plan, and keeps what it was asked for."""

    plan: Plan = field(default_factory=mlp_plan)
    error: Exception | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)

    def compile_model(self, model: Any, cluster: Any, batch: Any, loss_fn: Any = None, **options: Any) -> Any:
        self.asked.append({"cluster": cluster, **options})
        if self.error is not None:
            raise self.error
        return self

    program = "print('program')\n"
    buffers: Any = field(default_factory=dict)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    module = ModuleType("passes.pipeline")
    module.compile_model = made.compile_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "passes.pipeline", module)
    return made


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A target in a folder of its own, which is the current one."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    Path("model.py").write_text(TARGET)
    return "model.py:mlp"


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def running(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return running


def files() -> list[str]:
    return sorted(one.name for one in Path().iterdir() if one.name != "__pycache__")


# plan


def test_plan_prints_the_plan(run: Run, compiler: Compiler, target: str) -> None:
    assert run("plan", target, "--cluster", "cpu:4") == (0, render(compiler.plan), "a word of the user's\n")


def test_plan_passes_every_option_on(run: Run, compiler: Compiler, target: str) -> None:
    options = "--global-batch 24 --precision fp32 --optimizer sgd --fix dp=2,zero=0,recompute=none --memory-limit 1.5"
    code, _, _ = run("plan", target, "--cluster", "cpu:4", *options.split())
    asked = compiler.asked[0]
    assert code == 0 and asked.pop("cluster").name == "cpu:4" and callable(asked.pop("progress"))
    assert not asked.pop("stop")() and asked.pop("time_limit_s") is None
    assert asked == {
        "global_batch": 24, "precision": "fp32", "optimizer": "sgd", "fix": {"dp": 2, "zero": 0, "recompute": "none"},
        "target": target, "seq_len": None, "memory_limit_gib": 1.5,
    }  # fmt: skip


def test_json_holds_every_key_that_scripts_rely_on(run: Run, compiler: Compiler, target: str) -> None:
    assert run("plan", target, "--cluster", "cpu:4", "--json", "plan.json")[0] == 0
    plan = json.loads(Path("plan.json").read_text())
    assert {
        "autopar",
        "status",
        "stages",
        "step_time_s",
        "tokens_per_s_per_device",
        "mfu",
        "alternatives",
        "warnings",
    } <= (plan.keys())
    assert plan["model"].keys() >= {"name", "parameters", "trainable_parameters"}
    assert plan["cluster"].keys() >= {"name", "devices", "nodes", "device"}
    assert plan["workload"].keys() >= {"global_batch", "seq_len", "precision", "optimizer"}
    assert plan["mesh"].keys() == {"pp", "dp", "cp", "ep", "tp"}
    assert plan["zero"].keys() >= {"stage", "group"}
    assert plan["schedule"].keys() >= {"name", "microbatch", "microbatches", "virtual_stages"}
    assert plan["time_s"].keys() >= {
        "compute", "tp_comm", "dp_comm", "cp_comm", "ep_comm", "pp_comm", "bubble", "recompute", "optimizer"
    }  # fmt: skip
    assert plan["memory"][0].keys() >= {
        "stage", "peak_bytes", "limit_bytes", "parameters", "gradients", "optimizer", "activations", "logits",
        "buffers", "reserved_overhead",
    }  # fmt: skip
    assert plan["solver"].keys() >= {
        "name", "status", "objective_s", "bound_s", "gap", "seconds", "enumerated", "pruned", "solved"
    }  # fmt: skip


def test_json_on_stdout_is_all_of_stdout(run: Run, compiler: Compiler, target: str) -> None:
    code, out, _ = run("plan", target, "--cluster", "cpu:4", "--json", "-")
    assert code == 0 and json.loads(out) == json.loads(compiler.plan.to_json())


def test_out_holds_plan_program_and_buffers(run: Run, compiler: Compiler, target: str) -> None:
    compiler.buffers = {"inv_freq": torch.ones(2)}
    code, out, _ = run("plan", target, "--cluster", "cpu:4", "--out", "out")
    assert code == 0 and "torchrun --nproc-per-node 3 out/program.py" in out
    assert sorted(one.name for one in Path("out").iterdir()) == ["buffers.pt", "plan.yaml", "program.py"]
    assert Path("out/program.py").read_text() == compiler.program
    assert yaml.safe_load(Path("out/plan.yaml").read_text())["autopar"] == "0.1.0"


def test_config_without_a_global_batch_gets_a_row_per_device(run: Run, compiler: Compiler, target: str) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 9}
    Path("config.json").write_text(json.dumps(config))
    assert run("plan", "hf:config.json", "--cluster", "cpu:4", "--seq-len", "4")[0] == 0
    assert compiler.asked[0]["global_batch"] == 4 and compiler.asked[0]["seq_len"] == 4


# What is wrong is said in one sentence, and leaves nothing behind


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "no command given"),
        ("frob", "no such command 'frob'"),
        ("plan", "missing argument 'TARGET'"),
        ("plan model.py:mlp", "no --cluster given"),
        ("plan model.py:mlp --frob", "no such option: --frob"),
        ("plan model.py:mlp --cluster", "--cluster"),
        ("plan model.py:mlp --cluster none.yaml", "none.yaml: cannot be read: No such file"),
        ("plan model.py:mlp --cluster broken.yaml", "broken.yaml: not valid YAML in line 1"),
        ("plan model.py:mlp --cluster typo.yaml", "typo.yaml: nodez: not known; did you mean nodes?"),
        ("plan model.py:mlp --cluster 8xh101", "unknown device 'h101'; the nearest known: h100"),
        ("plan model.py:mlp --cluster h100", "neither a file nor a preset such as 8xh100"),
        ("plan model.py:mlp --cluster cpu:0", "a cluster has at least one device"),
        (
            "plan model.py:mlp --cluster cpu:4 --fix tpp=2",
            "--fix tpp: not known; the keys are pp, dp, cp, ep, tp, zero",
        ),
        ("plan model.py:mlp --cluster cpu:4 --fix tp", "--fix tp: expected key=value"),
        ("plan model.py:mlp --cluster cpu:4 --fix tp=two", "--fix tp=two: expected a positive whole number"),
        ("plan model.py:mlp --cluster cpu:4 --fix tp=0", "--fix tp=0: expected a positive whole number"),
        ("plan model.py:mlp --cluster cpu:4 --fix tp=-2", "--fix tp=-2: expected a positive whole number"),
        ("plan model.py:mlp --cluster cpu:4 --fix zero=4", "--fix zero=4: expected 0, 1, 2 or 3"),
        ("plan model.py:mlp --cluster cpu:4 --fix tp=2,tp=4", "--fix tp is given twice"),
        ("plan model.py:mlp --cluster cpu:4 --fix recompute=most", "expected one of none, selective, full"),
        ("plan model.py:mlp --cluster cpu:4 --global-batch 0", "'--global-batch'"),
        ("plan model.py:mlp --cluster cpu:4 --global-batch ten", "'--global-batch'"),
        ("plan model.py:mlp --cluster cpu:4 --seq-len -1", "'--seq-len'"),
        ("plan model.py:mlp --cluster cpu:4 --seq-len 4", "--seq-len is for hf: targets"),
        ("plan model.py:mlp --cluster cpu:4 --precision fp8", "'--precision'"),
        ("plan model.py:mlp --cluster cpu:4 --optimizer lion", "'--optimizer'"),
        ("plan model.py:mlp --cluster cpu:4 --memory-limit 0", "--memory-limit 0: expected a positive number of GiB"),
        ("plan model.py:mlp --cluster cpu:4 --memory-limit nan", "--memory-limit nan: expected a positive number"),
        ("plan model.py:mlp --cluster cpu:4 --json none/plan.json", "none/plan.json: cannot be written: No such file"),
        ("plan model.py:mlp --cluster cpu:4 --out .", ". is not empty and not an output of autopar"),
        ("plan model.py:mlp --cluster cpu:4 --out model.py", "model.py is a file: --out names a folder"),
        ("plan model.py:none --cluster cpu:4", "model.py has no function 'none'; it has mlp, nothing"),
        ("plan model.py:nothing --cluster cpu:4", "nothing() returned None, not (model, batch)"),
        ("plan none.py:mlp --cluster cpu:4", "there is no file none.py"),
        ("plan model --cluster cpu:4", "expected file.py:function or hf:PATH/config.json"),
        ("plan hf:none --cluster cpu:4", "none: cannot be read: No such file"),
        ("show none.yaml", "none.yaml: cannot be read: No such file"),
        ("show model.py", "model.py: "),
        ("generate model.py:mlp --cluster cpu:4", "generate needs --out DIR"),
        ("generate none.yaml --out out", "none.yaml: cannot be read"),
        ("generate none.yaml --out out --cluster cpu:4", "--cluster: a saved plan has its own"),
        ("verify none", "none: there is no program.py in it"),
        ("verify . --steps 0", "'--steps'"),
        ("verify . --timeout 0", "--timeout 0: expected a positive number of seconds"),
    ],
)
def test_bad_input_is_one_sentence_exit_2_and_nothing_written(
    words: str, said: str, run: Run, compiler: Compiler, target: str
) -> None:
    Path("broken.yaml").write_text("nodes: [")
    Path("typo.yaml").write_text("nodez: 2\ndevices_per_node: 8\ndevice: h100\n")
    before = files()
    code, out, err = run(*words.split())
    err = err.replace("a word of the user's\n", "")
    assert (code, out) == (2, "")
    assert err.startswith("autopar: ") and err.count("\n") == 1 and said in err
    assert files() == before


@pytest.mark.parametrize(
    "error, code",
    [
        (NoPlanFits("no plan fits 4 cpu"), 1),
        (AutoparError("the program failed on rank 1"), 1),
        (BadInput("--fix tp=3: not with dp=2 on 4 devices"), 2),
        (CaptureError("model.py:3: cannot be traced"), 2),
        (KeyError("inside"), 2),
    ],
)
def test_error_of_the_compiler_gives_its_exit_code_and_writes_nothing(
    error: Exception, code: int, run: Run, compiler: Compiler, target: str
) -> None:
    compiler.error = error
    words = ("plan", target, "--cluster", "cpu:4", "--json", "plan.json", "--out", "out")
    got, out, err = run(*words)
    assert (got, out) == (code, "")
    assert "Traceback" not in err and str(error) in err and files() == ["model.py"]
    with pytest.raises(type(error)):
        run(*words, "--debug")


# show and generate


def test_show_reads_a_plan_back(run: Run, compiler: Compiler, target: str) -> None:
    run("plan", target, "--cluster", "cpu:4", "--out", "out", "--json", "plan.json")
    shown = render(compiler.plan).replace(", 210 ms", "")  # plan.yaml leaves out how long the search took
    assert run("show", "out/plan.yaml") == run("show", "out") == (0, shown, "")
    assert run("show", "plan.json", "--blocks") == (0, render(compiler.plan, blocks=True), "")
    assert run("show", "plan.json", "--json", "copy.json")[0] == 0
    assert json.loads(Path("copy.json").read_text()) == json.loads(Path("plan.json").read_text())


def test_generate_from_a_target_is_plan_with_out(run: Run, compiler: Compiler, target: str) -> None:
    code, out, _ = run("generate", target, "--cluster", "cpu:4", "--out", "out")
    assert code == 0 and out == "out: written; to train: torchrun --nproc-per-node 3 out/program.py\n"
    assert compiler.asked[0]["precision"] == "bf16" and compiler.asked[0]["optimizer"] == "adamw"


@pytest.fixture
def saved(compiler: Compiler, target: str) -> Path:
    request = replace(compiler.plan.request, target=target, cluster="cpu:4", global_batch=12, seq_len=None)
    compiler.plan = replace(compiler.plan, request=request)
    Path("plan.yaml").write_text(compiler.plan.to_yaml())
    return Path("plan.yaml")


def test_generate_from_a_plan_pins_everything(run: Run, compiler: Compiler, saved: Path) -> None:
    assert run("generate", "plan.yaml", "--out", "out")[0] == 0
    asked = compiler.asked[0]
    assert asked["fix"].keys() == set(FIX_KEYS) and asked["fix"]["dp"] == 3 and asked["global_batch"] == 12
    assert Path("out/plan.yaml").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize(("pinned", "kept"), [({}, False), ({"recompute": "full"}, True)])
def test_recompute_that_differs_between_stages_is_not_pinned_unless_it_was(
    pinned: dict[str, str], kept: bool, run: Run, compiler: Compiler, saved: Path
) -> None:
    stages = tuple(Stage((BlockPlan("Layer", 2, again, "whole"),), {}) for again in (2, 0))
    request = replace(compiler.plan.request, fix=pinned)
    compiler.plan = replace(compiler.plan, stages=stages, request=request)
    saved.write_text(compiler.plan.to_yaml())
    assert run("generate", "plan.yaml", "--out", "out")[0] == 0
    assert ("recompute" in compiler.asked[0]["fix"]) == kept


@pytest.mark.parametrize(
    "change, said",
    [
        ({"autopar": "0.0.1"}, "was made by autopar 0.0.1, this is 0.1.0"),
        ({"model": {"fingerprint": "other"}}, "model.py:mlp is not the model of the plan any more"),
        ({"cluster": {"devices": 8}}, "cluster cpu:4 is no longer the one of the plan"),
        ({"mesh": {"dp": 2}}, "cannot be made again: mesh would differ"),
        ({"rank_order": ["dp", "pp", "tp"]}, "cannot be made again: rank_order would differ"),
        ({"request": {"target": ""}}, "the plan was made in Python"),
    ],
)
def test_plan_that_belongs_to_something_else_is_refused(
    change: dict[str, Any], said: str, run: Run, compiler: Compiler, saved: Path
) -> None:
    values = yaml.safe_load(saved.read_text())
    for key, value in change.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    saved.write_text(yaml.safe_dump(values))
    code, _, err = run("generate", "plan.yaml", "--out", "out")
    assert code == 2 and said in err and files() == ["model.py", "plan.yaml"]


# verify


def test_verification_tells_the_worst_difference_and_where() -> None:
    steps = (
        Step(1.0, 1.0, Difference(1e-7, "a.weight"), Difference(1e-8, "a.weight")),
        Step(0.5, 0.5, Difference(3e-5, "b.weight"), Difference(1e-8, "a.weight")),
    )
    good, bad = Verification("out: dp 2", steps[:1], ()), Verification("out: dp 2", steps, ())
    assert good.passed and good.text.endswith("passed: the bound is 1e-05\n")
    assert not bad.passed and bad.text.endswith("FAILED: the bound is 1e-05\n")
    assert "gradients 3.0e-05 (b.weight), weights 1.0e-08" in bad.text
    assert not Verification("", steps[:1], ("c.weight",)).passed
    assert not Verification("", (Step(float("nan"), 1.0, Difference(), Difference()),), ()).passed


def test_verify_exits_with_1_where_the_program_differs(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = Verification("out: dp 2", (Step(1.0, 2.0, Difference(), Difference()),), ())
    monkeypatch.setattr("autopar.verify.verify", lambda folder, **options: wrong)
    assert run("verify", str(tmp_path)) == (1, wrong.text, "")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"mesh": Mesh(dp=16)}, "the plan is for 16 devices: verify runs up to 8 processes"),
        ({"model": ModelInfo("Huge", 10**12, 10**12, "")}, "Huge has 1,000,000,000,000 parameters"),
        ({"request": replace(mlp_plan().request, target="")}, "the plan was made in Python"),
    ],
)
def test_program_that_cannot_run_here_is_not_started(
    change: dict[str, Any], said: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "plan.yaml").write_text(replace(mlp_plan(), **change).to_yaml())
    (tmp_path / "program.py").touch()
    code, _, err = run("verify", str(tmp_path))
    assert code == 2 and err.startswith("autopar: ") and said in err


def test_dropout_is_off_inside_and_back_afterwards() -> None:
    x = torch.ones(2, 3, 4, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.9, batch_first=True)
    with without_dropout():
        assert torch.equal(F.dropout(x, 0.9), x)
        assert torch.equal(nn.Dropout(0.9)(x), x)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x, None, 0.9, is_causal=True), x)
        assert torch.equal(layer(x[0]), layer(x[0]))
    assert not torch.equal(F.dropout(x, 0.9), x)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plan_and_verify_of_an_example(run: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    target = str(ROOT / "examples" / "mlp.py") + ":small"
    code, _, err = run("plan", target, *f"--cluster cpu:2 --precision fp32 --fix tp=2 --out {out}".split())
    assert code == 0, err
    code, said, err = run("verify", out, "--steps", "2")
    assert code == 0 and "passed" in said, err
    program = Path(out) / "program.py"
    program.write_text(program.read_text().replace("F.gelu(", "0.9 * F.gelu("))
    assert run("verify", out, "--steps", "2")[0] == 1


# The rest


def test_fix_takes_words_and_numbers() -> None:
    assert parse_fix("tp=2, zero=0,schedule=zbv") == {"tp": 2, "zero": 0, "schedule": "zbv"}
    assert parse_fix(None) == parse_fix("") == {}


def test_version_is_printed(run: Run) -> None:
    assert run("--version") == (0, "autopar 0.1.0\n", "")


def test_help_comes_at_once_and_without_torch() -> None:
    began = time.monotonic()
    words = [sys.executable, "-X", "importtime", "-m", "autopar", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in loaded and not loaded & {"torch", "transformers", "ortools", "rich"}
    assert all(command in done.stdout for command in ("plan", "show", "generate", "verify"))
    assert time.monotonic() - began < 5  # under 0.5 s on an idle machine


def test_examples_are_python_that_names_no_private_part_of_autopar() -> None:
    for file in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("_") for name in names if name != "__future__"), file


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("pp=8", "--fix pp=8,dp=1,tp=1 needs 8 devices; there are 4: pp * dp * tp may be 4 at most"),
        ("pp=2,schedule=zbv,virtual_stages=3", "use virtual_stages=2, or schedule=interleaved"),
        ("pp=2,dp=2,tp=1,schedule=zbv", "stages that share tokens.weight on one rank"),
    ],
)
def test_pipeline_that_cannot_be_is_one_sentence_and_nothing_is_written(
    fix: str, said: str, run: Run, target: str
) -> None:
    example = str(ROOT / "examples" / "nanogpt.py") + ":small"
    words = ("plan", example, "--cluster", "cpu:4", "--fix", fix, "--out", "out", "--json", "plan.json")
    code, out, err = run(*words)
    assert (code, out) == (2, "") and err.startswith("autopar: ") and err.count("\n") == 1 and said in err
    assert files() == ["model.py"]


def test_a_time_limit_gives_the_best_plan_so_far_with_its_gap(tmp_path: Path) -> None:
    found = []
    for more in ((), ("--time-limit", "0.001")):
        file = tmp_path / f"plan{len(found)}.json"
        assert main(["plan", "examples/nanogpt.py:small", "--cluster", "cpu:4", "--json", str(file), *more]) == 0
        found.append(json.loads(file.read_text()))
    free, limited = found
    assert limited["status"] == "feasible" and limited["solver"]["gap"] > 0
    assert limited["solver"]["solved"] < free["solver"]["solved"]
    assert limited["step_time_s"] >= free["step_time_s"] * (1 - 1e-9)
    assert limited["solver"]["bound_s"] <= free["step_time_s"] * (1 + 1e-9)


def test_where_nobody_watches_progress_is_logged_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "LOGGED_S", 0.0)
    words = ["plan", "examples/nanogpt.py:small", "--cluster", "cpu:4", "--fix", "pp=1"]
    assert main(words) == 0
    said = capsys.readouterr().err.splitlines()
    assert "autopar: normalizing the graph" in said and any(one.startswith("autopar: tp 1, dp 4, ") for one in said)
    monkeypatch.setenv("RANK", "1")
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_a_time_limit_is_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "examples/nanogpt.py:small", "--cluster", "cpu:4", "--time-limit", "0"]) == 2
    assert "--time-limit 0: expected a positive number of seconds" in capsys.readouterr().err
