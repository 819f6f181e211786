"""TARGET of the command line: the model, its batch and its loss, from a Python function or a Hugging Face config."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.report import PLAN
from costmodels.cluster import Cluster
from costmodels.errors import BadInput, PlanMismatch
from passes.plan import Plan

if TYPE_CHECKING:
    from passes.pipeline import Compiled

ROWS = 2  # of a batch made here: the compiler prices any number of rows from it
DEFAULT_SEQUENCE = 1024  # where a config bounds it by nothing
DEFAULT_IMAGE = 224

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """What a TARGET gives. The parameters may be on the meta device."""

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    name: str


def load_target(text: str, *, seq_len: int | None = None, rows: int = ROWS) -> Target:
    """The model that `file.py:function` returns, or that `hf:PATH/config.json` describes (nothing is downloaded).

    `seq_len` and `rows` shape the batch of a config; a function gives its own batch.
    """
    if text.startswith("hf:"):
        return _from_config(Path(text.removeprefix("hf:")), seq_len, rows)
    if not (".py:" in text or text.endswith(".py")):
        raise BadInput(f"TARGET '{text}': expected file.py:function or hf:PATH/config.json")
    if seq_len is not None:
        raise BadInput(f"--seq-len is for hf: targets: the batch of {text} comes from the function itself")
    return _from_function(text)


def located(plan: Plan, file: Path) -> Plan:
    """The plan of a file with the paths in its request as they are from here, where it was made in another folder.

    They are looked for from here, then from the folder of the file and those above it.
    """

    def found(text: str) -> str:
        parts = re.fullmatch(r"(hf:|)(.*?)(:\w+|)", text)
        assert parts is not None, "every text has these parts"
        scheme, path, function = parts.groups()
        bases = [Path(), *(file / PLAN).resolve().parents]
        base = next((one for one in bases if path and (one / path).exists()), None)
        return f"{scheme}{base / path}{function}" if base is not None else text

    request = plan.request
    is_file = Path(request.cluster).suffix in (".yaml", ".yml")
    cluster = found(request.cluster) if is_file else request.cluster
    return replace(plan, request=replace(request, target=found(request.target), cluster=cluster))


def compile_again(
    plan: Plan, *, precision: str | None = None, progress: Callable[[str], None] = lambda text: None
) -> tuple[Target, Compiled]:
    """The target of a saved plan, and the plan made again with every choice pinned, for another precision if given.

    Raises PlanMismatch where the target or the cluster is no longer what it was.
    """
    from passes.pipeline import compile_model

    request = plan.request
    if not request.target:
        raise BadInput("the plan was made in Python: nothing says where its model is; use job.save() there")
    cluster = Cluster.load(request.cluster)
    was = (plan.cluster.device, plan.cluster.nodes, plan.cluster.devices)
    if (cluster.device.name, cluster.nodes, cluster.devices) != was:
        raise PlanMismatch(f"cluster {request.cluster} is no longer the one of the plan: make the plan again")
    target = load_target(request.target, seq_len=request.seq_len)
    compiled = compile_model(
        target.model,
        cluster,
        target.batch,
        target.loss_fn,
        global_batch=plan.workload.global_batch,
        precision=precision or plan.workload.precision,
        optimizer=plan.workload.optimizer,
        fix=_pinned(plan),
        target=request.target,
        seq_len=request.seq_len,
        memory_limit_gib=request.memory_limit_gib,
        progress=progress,
    )
    found = compiled.plan.model.fingerprint
    if found != plan.model.fingerprint and precision in (None, plan.workload.precision):
        raise PlanMismatch(f"{request.target} is not the model of the plan any more: make the plan again")
    return target, compiled


def _pinned(plan: Plan) -> dict[str, int | str]:
    """Every choice of a plan, but for the number of layers recomputed where it is some: it follows from the others."""
    fix = plan.fixed()
    blocks = [block for stage in plan.stages for block in stage.blocks if block.count]
    some = any(block.recomputed for block in blocks) and any(block.recomputed < block.count for block in blocks)
    if some and plan.request.fix.get("recompute") != "full":
        del fix["recompute"]
    return fix


# -- file.py:function -----------------------------------------------------------------------------------------------


def _from_function(text: str) -> Target:
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise BadInput(f"TARGET '{text}' names no function: write {text.rstrip(':')}:function")
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"TARGET '{text}': there is no file {file}")
    module = _imported(file)
    function = getattr(module, name, None)
    if function is None:
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        known = f"; it has {', '.join(own)}" if own else ""
        raise BadInput(f"{file} has no function '{name}'{known}")
    if not callable(function):
        raise BadInput(f"{file}: '{name}' is {_described(function)}, not a function")
    with _blamed(file, f"calling {name}()"):
        made = function()
    where = f"{file}:{_line_of(function)}"
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise BadInput(f"{where}: {name}() returned {_described(made)}, not (model, batch) or (model, batch, loss_fn)")
    model, batch, loss_fn = (*made, None)[:3]
    if not isinstance(model, nn.Module):
        raise BadInput(f"{where}: {name}() returned {_described(model)} as the model, not a torch.nn.Module")
    if loss_fn is not None and not callable(loss_fn):
        raise BadInput(f"{where}: {name}() returned {_described(loss_fn)} as loss_fn, not a function")
    return Target(model, batch, loss_fn, name)


def _imported(file: Path) -> ModuleType:
    """The file as a module that can import its neighbours, as `python file.py` can."""
    name = f"autopar_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes look themselves up there
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with _blamed(file, "importing it"):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _blamed(file: Path, doing: str) -> Iterator[None]:
    """What the user's code raises becomes one sentence that names the line in the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        said = str(error.msg if isinstance(error, SyntaxError) else error).strip().partition("\n")[0]
        raised = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise BadInput(f"{file}{f':{line}' if line else ''}: {doing} raised {raised}") from error


def _line_of(function: object) -> int:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return int(getattr(code, "co_firstlineno", 1))


def _described(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


# -- hf:PATH/config.json --------------------------------------------------------------------------------------------


def _from_config(path: Path, seq_len: int | None, rows: int) -> Target:
    """The model of a config on disk: parameters on meta, buffers real, a random batch that its `forward` accepts."""
    file = path / "config.json" if path.is_dir() else path
    values = _json(file)
    if "model_type" not in values:
        raise BadInput(f"{file}: no model_type: not the config of a transformers model")
    try:
        import transformers
    except ImportError:
        raise BadInput("hf: targets need the transformers package: pip install 'transformers>=5'") from None
    transformers.logging.set_verbosity_error()
    with _said_by_transformers(file):
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    text = config.get_text_config()
    for one in (config, text):
        if hasattr(one, "use_cache"):
            one.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # where labels shifted right begin; any token does for a plan
    model = _built(transformers, config, file)
    batch = _batch(model, config, file, seq_len, rows)
    return Target(model, batch, None, file.resolve().parent.name)


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"{file}: cannot be read: not a text file") from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{file}: not valid JSON in line {error.lineno}: {error.msg}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file}: expected the mapping of a config.json, got {_described(values)}")
    return values


@contextlib.contextmanager
def _said_by_transformers(file: Path) -> Iterator[None]:
    """What transformers raises about a config, in one sentence."""
    try:
        yield
    except BadInput:
        raise
    except Exception as error:
        said = " ".join(str(error).split()).split(". ")[0] or type(error).__name__
        raise BadInput(f"{file}: transformers cannot build this model: {said}") from error


def _built(transformers: Any, config: Any, file: Path) -> nn.Module:
    names = getattr(config, "architectures", None) or []
    with _said_by_transformers(file), _parameters_on_meta():
        if not names:
            model = transformers.AutoModelForCausalLM.from_config(config)
        elif (made := getattr(transformers, names[0], None)) is None:
            raise BadInput(f"{file}: transformers {transformers.__version__} has no architecture {names[0]}")
        else:
            model = made(config)
    assert isinstance(model, nn.Module), "transformers models are modules"
    return model.train()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside keep shapes only of their parameters. Buffers are computed: a rotary table is its values."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _batch(model: nn.Module, config: Any, file: Path, seq_len: int | None, rows: int) -> dict[str, torch.Tensor]:
    """Random inputs and labels by the names that `forward` takes."""
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)

    def whole(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, (rows, *shape), generator=generator)

    head = type(model).__name__
    of_row = head.endswith("Classification") and not head.endswith("TokenClassification")  # one label per row
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        if seq_len is not None:
            raise BadInput(f"{file}: {head} reads images and has no sequence: leave out --seq-len")
        channels, height, width = _image(config)
        batch = {"pixel_values": torch.randn((rows, channels, height, width), generator=generator)}
        if "labels" in accepted and of_row:
            return batch | {"labels": whole(max(1, int(config.num_labels)))}
        raise BadInput(f"{file}: {head} computes no loss from images and labels; write a file.py:function target")
    if "input_ids" not in accepted:
        raise BadInput(f"{file}: {head} reads {next(iter(accepted))}, not input_ids; write a file.py:function target")
    sequence = _sequence(model, config, file, seq_len)
    batch = {"input_ids": whole(int(config.get_text_config().vocab_size), sequence)}
    if "start_positions" in accepted:
        return batch | {name: whole(sequence) for name in ("start_positions", "end_positions")}
    if "labels" not in accepted:
        raise BadInput(
            f"{file}: {head} computes no loss: name a model with a head in 'architectures', such as one that ends in "
            "ForCausalLM, or write a file.py:function target with a loss_fn"
        )
    if not head.endswith("Classification"):
        return batch | {"labels": whole(int(config.get_text_config().vocab_size), sequence)}
    if of_row and config.num_labels == 1:  # a regression
        return batch | {"labels": torch.randn((rows,), generator=generator)}
    return batch | {"labels": whole(int(config.num_labels), *(() if of_row else (sequence,)))}


def _sequence(model: nn.Module, config: Any, file: Path, seq_len: int | None) -> int:
    """Tokens per row: what is asked for, or all that the model has positions for."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_source_positions", "max_seq_len")
    name, most = next(((n, v) for n in names if isinstance(v := getattr(text, n, None), int) and v > 0), ("", 0))
    for module in model.modules():  # a table of positions with a padding entry counts from behind it
        if isinstance(module, nn.Embedding) and module.num_embeddings == most and module.padding_idx is not None:
            most -= module.padding_idx + 1
            break
    if seq_len is None:
        return most or DEFAULT_SEQUENCE
    if most and seq_len > most:
        raise BadInput(f"--seq-len {seq_len} is more than the {most} positions of {file} ({name})")
    return seq_len


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or DEFAULT_IMAGE
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(getattr(vision, "num_channels", 3)), int(height), int(width)
