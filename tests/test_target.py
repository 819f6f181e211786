"""TARGET: what a user's function or a config on disk gives, and what is said where it gives nothing."""

import builtins
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.target import load_target, located
from autopar.verify import materialise
from costmodels.errors import BadInput
from test_report import sample_plan

TARGETS = """
import torch
from torch import nn
import a_neighbour

def two():
    return nn.Linear(3, 1), {"x": torch.ones(4, 3)}

def three():
    return nn.Linear(3, 1), torch.ones(4, 3), lambda out, batch: out.sum()

def only_a_model():
    return nn.Linear(3, 1)

def words():
    return "model", "batch"

def bad_loss():
    return nn.Linear(3, 1), torch.ones(4, 3), 0.5

def one_argument(size):
    return nn.Linear(size, 1), torch.ones(4, size)

def broken():
    return 1 / 0

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a_neighbour.py").touch()
    (tmp_path / "targets.py").write_text(TARGETS)
    return tmp_path / "targets.py"


def test_function_gives_model_batch_and_loss(file: Path) -> None:
    two, three = load_target(f"{file}:two"), load_target(f"{file}:three")
    assert isinstance(two.model, torch.nn.Linear) and two.loss_fn is None and two.name == "two"
    assert three.batch.shape == (4, 3) and three.loss_fn is not None


@pytest.mark.parametrize(
    "name, said",
    [
        ("none_such", "has no function 'none_such'; it has two, three, only_a_model"),
        ("NUMBER", "'NUMBER' is an int, not a function"),
        ("only_a_model", r":12: only_a_model\(\) returned a Linear, not \(model, batch\) or"),
        ("words", r":15: words\(\) returned a str as the model, not a torch.nn.Module"),
        ("bad_loss", r":18: bad_loss\(\) returned a float as loss_fn"),
        ("one_argument", r"calling one_argument\(\) raised TypeError: one_argument\(\) missing 1 required"),
        ("broken", r"targets.py:25: calling broken\(\) raised ZeroDivisionError: division by zero"),
        ("", "names no function"),
    ],
)
def test_function_that_gives_no_model_is_named(name: str, said: str, file: Path) -> None:
    with pytest.raises(BadInput, match=said):
        load_target(f"{file}:{name}")


@pytest.mark.parametrize(
    "text, said",
    [
        ("import no_such_module_here", r"bad.py:1: importing it raised ModuleNotFoundError: No module named"),
        ("x = 1\ndef f(:", r"bad.py:2: importing it raised SyntaxError: "),
        ("raise SystemExit(3)", "bad.py:1: importing it raised SystemExit: 3"),
    ],
)
def test_file_that_cannot_be_imported_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(BadInput, match=said):
        load_target(f"{tmp_path}/bad.py:f")


@pytest.mark.parametrize(
    "text, said",
    [
        ("model", "expected file.py:function or hf:PATH"),
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("nowhere.py", "names no function: write nowhere.py:function"),
        ("hf:nowhere", "nowhere: cannot be read: No such file"),
    ],
)
def test_target_that_is_not_there(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load_target(text)


def test_sequence_length_of_a_function_is_its_own(file: Path) -> None:
    with pytest.raises(BadInput, match="--seq-len is for hf: targets"):
        load_target(f"{file}:two", seq_len=8)


# Hugging Face

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
CONFIGS: dict[str, dict[str, Any]] = {
    "causal": {"model_type": "llama", **SMALL, "max_position_embeddings": 64, "dtype": "bfloat16",
               "architectures": ["LlamaForCausalLM"]},
    "no architecture": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 48,
                        "vocab_size": 99},
    "masked, padded positions": {"model_type": "roberta", **SMALL, "max_position_embeddings": 66, "pad_token_id": 1,
                                 "architectures": ["RobertaForMaskedLM"]},
    "rows": {"model_type": "bert", **SMALL, "architectures": ["BertForSequenceClassification"]},
    "encoder and decoder": {"model_type": "bart", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
                            "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
                            "decoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": 64,
                            "architectures": ["BartForConditionalGeneration"]},
    "image": {"model_type": "vit", **{k: v for k, v in SMALL.items() if k != "vocab_size"}, "image_size": 32,
              "patch_size": 8, "architectures": ["ViTForImageClassification"]},
}  # fmt: skip


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize(
    "kind, shapes",
    [
        ("causal", {"input_ids": (2, 64), "labels": (2, 64)}),
        ("no architecture", {"input_ids": (2, 48), "labels": (2, 48)}),
        ("masked, padded positions", {"input_ids": (2, 64), "labels": (2, 64)}),
        ("rows", {"input_ids": (2, 512), "labels": (2,)}),
        ("encoder and decoder", {"input_ids": (2, 64), "labels": (2, 64)}),
        ("image", {"pixel_values": (2, 3, 32, 32), "labels": (2,)}),
    ],
)
def test_config_gives_a_meta_model_and_a_batch_that_it_takes(
    kind: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    target = load_target(f"hf:{write_config(tmp_path, CONFIGS[kind])}")
    assert {name: tuple(one.shape) for name, one in target.batch.items()} == shapes
    assert {(p.device.type, p.dtype) for p in target.model.parameters()} == {("meta", torch.float32)}
    assert {b.device.type for b in target.model.buffers()} <= {"cpu"}
    materialise(target.model)
    assert target.model(**target.batch).loss.isfinite()


def test_folder_of_a_config_does_too_and_the_sequence_may_be_shorter(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIGS["causal"])
    target = load_target(f"hf:{tmp_path}", seq_len=16, rows=3)
    assert target.batch["input_ids"].shape == (3, 16)
    assert target.name == tmp_path.name
    assert target.model.config.use_cache is False


def test_same_config_gives_the_same_batch(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIGS["causal"])
    one, two = load_target(f"hf:{tmp_path}"), load_target(f"hf:{tmp_path}")
    assert all(torch.equal(one.batch[name], two.batch[name]) for name in one.batch)


@pytest.mark.parametrize(
    "config, said",
    [
        ({}, "no model_type"),
        ({"model_type": "no_such_family"}, "transformers cannot build this model"),
        ({**CONFIGS["causal"], "architectures": ["NoSuchForCausalLM"]}, "has no architecture NoSuchForCausalLM"),
        ({**CONFIGS["causal"], "architectures": ["LlamaModel"]}, "LlamaModel computes no loss"),
        ({**CONFIGS["causal"], "num_attention_heads": "four"}, "transformers cannot build this model"),
    ],
)
def test_config_that_gives_no_model_is_named(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=re.escape(said)) as caught:
        load_target(f"hf:{write_config(tmp_path, config)}")
    assert "\n" not in str(caught.value)


def test_config_that_is_not_json_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type":\n oops}')
    with pytest.raises(BadInput, match="not valid JSON in line 2"):
        load_target(f"hf:{tmp_path}")


def test_sequence_beyond_the_positions_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIGS["causal"])
    with pytest.raises(BadInput, match="--seq-len 65 is more than the 64 positions"):
        load_target(f"hf:{tmp_path}", seq_len=65)


def test_missing_transformers_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return importing(name, *args, **kwargs)

    write_config(tmp_path, CONFIGS["causal"])
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(BadInput, match="pip install 'transformers>=5'"):
        load_target(f"hf:{tmp_path}")


def test_a_plan_of_another_folder_finds_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, elsewhere = tmp_path.resolve() / "made", tmp_path / "elsewhere"
    for folder in (made / "out", made / "config", elsewhere):
        folder.mkdir(parents=True)
    for name in ("model.py", "cluster.yaml", "config/config.json", "plan.yaml"):
        (made / name).touch()
    monkeypatch.chdir(elsewhere)

    def asked(target: str, cluster: str, file: Path) -> tuple[str, str]:
        plan = replace(sample_plan(), request=replace(sample_plan().request, target=target, cluster=cluster))
        request = located(plan, file).request
        return request.target, request.cluster

    cluster = f"{made}/cluster.yaml"
    assert asked("model.py:f", "cluster.yaml", Path("../made/out")) == (f"{made}/model.py:f", cluster)
    assert asked("hf:config", "8xh100", made / "plan.yaml") == (f"hf:{made}/config", "8xh100")
    assert asked("hf:config/config.json", "cpu:4", made / "out") == (f"hf:{made}/config/config.json", "cpu:4")
    assert asked("none.py:f", "none.yaml", made / "out") == ("none.py:f", "none.yaml")
    (elsewhere / "model.py").touch()  # what is here comes first
    assert asked("model.py:f", "cluster.yaml", made / "out") == ("model.py:f", cluster)
