"""The full weights and buffers of the user's model, as they are or as its own initialisers make them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from autopar.runtime.module import derived_seed
from costmodels.errors import BadInput

INIT_SEED = 0


def full_weights(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Every parameter and persistent buffer by name: the model's own tensors, or freshly initialised where on meta."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return {name: t.detach() for name, t in model.state_dict().items()}
    return {name: t for name, t in _initialised(model).items() if name in model.state_dict()}


def full_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that no state dict holds (rotary frequencies, masks): their values, initialised where on meta."""
    persistent = model.state_dict().keys()
    wanted = {name: b for name, b in model.named_buffers(remove_duplicate=False) if name not in persistent}
    if not wanted:
        return {}
    if not any(b.is_meta for b in wanted.values()):
        return {name: b.detach() for name, b in wanted.items()}
    owners = {name.rpartition(".")[0] for name in wanted}
    made: dict[str, torch.Tensor] = {}
    for path in sorted(owners):
        made |= {f"{path}.{k}" if path else k: v for k, v in _module_tensors(model, path).items()}
    return {name: made[name] for name in wanted}


def _initialised(model: nn.Module) -> dict[str, torch.Tensor]:
    """All tensors of a meta model, module by module; the same whatever the plan. Tied names share one tensor."""
    made: dict[str, torch.Tensor] = {}
    by_id: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        if not own:
            continue
        fresh = _module_tensors(model, path) if any(id(t) not in by_id for t in own.values()) else {}
        for name, tensor in own.items():
            if id(tensor) not in by_id:
                by_id[id(tensor)] = fresh[name]
            made[f"{path}.{name}" if path else name] = by_id[id(tensor)]
    return made


def _module_tensors(model: nn.Module, path: str) -> dict[str, torch.Tensor]:
    """The own parameters and buffers of one module, initialised as the user's model would, seeded by its path."""
    module = model.get_submodule(path)
    alone = copy.copy(module)
    alone._modules, alone._parameters, alone._buffers = {}, {}, {}
    with torch.no_grad():
        for name, p in module._parameters.items():
            alone._parameters[name] = None if p is None else nn.Parameter(_empty(p), p.requires_grad)
        for name, b in module._buffers.items():
            alone._buffers[name] = None if b is None else _empty(b)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(INIT_SEED, path))
        whole = getattr(model, "_init_weights", None)
        if callable(whole):
            with torch.no_grad():
                whole(alone)
        elif callable(getattr(alone, "reset_parameters", None)):
            alone.reset_parameters()  # type: ignore[operator]
        else:
            names = ", ".join((*module._parameters, *module._buffers))
            raise BadInput(
                f"{path or type(model).__name__} ({type(module).__name__}) is on meta and has no reset_parameters() "
                f"to initialise {names}; build the model on the CPU, or pass its weights to load_state_dict"
            )
    return {n: t.detach() for n, t in (*alone._parameters.items(), *alone._buffers.items()) if t is not None}


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()
