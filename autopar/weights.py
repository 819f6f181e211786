"""The full weights and buffers of the user's model, as they are or as its own initialisers make them."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Mapping

import torch
from torch import nn

from autopar.runtime.module import derived_seed
from costmodels.errors import BadInput

INIT_SEED = 0
PART = 2**24  # elements that are summed at once


def full_weights(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Every parameter and persistent buffer by name: the model's own tensors, or freshly initialised where on meta."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return {name: t.detach() for name, t in model.state_dict().items()}
    return _needed(model, _initialised(model), model.state_dict())


def full_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that no state dict holds (rotary frequencies, masks): their values, initialised where on meta."""
    persistent = model.state_dict().keys()
    wanted = {name: b for name, b in model.named_buffers(remove_duplicate=False) if name not in persistent}
    if not any(b.is_meta for b in wanted.values()):
        return {name: b.detach() for name, b in wanted.items()}
    return _needed(model, _initialised(model, {id(model.get_submodule(n.rpartition(".")[0])) for n in wanted}), wanted)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    """Of every tensor its shape, its dtype and the sum of its bits, exact in any order: equal where the tensors are."""
    return {
        name: (tuple(t.shape), str(t.dtype), _sum_of_bits(t.detach()))
        if isinstance(t, torch.Tensor)
        else (str(type(t)),)
        for name, t in tensors.items()
    }


def _sum_of_bits(tensor: torch.Tensor) -> int:
    numbers = tensor.reshape(-1)
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers).view(-1)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.itemsize]
    # in parts: a sum in int64 may first make a copy in int64
    return sum(int(part.sum(dtype=torch.int64)) for part in numbers.view(bits).split(PART))


def _needed(model: nn.Module, made: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Those of `made`; raises BadInput for the first module of which some were not made."""
    found = {name: made[name] for name in names if name in made}
    missing = [name for name in names if name not in made]
    if missing:
        path = missing[0].rpartition(".")[0]
        leaves = [leaf for at, _, leaf in (name.rpartition(".") for name in missing) if at == path]
        raise BadInput(
            f"{path or 'the model'} ({type(model.get_submodule(path)).__name__}) is on meta and nothing initialises "
            f"{', '.join(leaves)}: neither its reset_parameters() nor the model's _init_weights(module) writes it; "
            "build the model on the CPU"
        )
    return found


def _initialised(model: nn.Module, only: Container[int] | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a model, those on meta as its own initialisers make them; the same whatever the plan.

    What no initialiser writes is left out. Tied names share one tensor. `only`: ids of the modules that are wanted.
    """
    whole = _unwritten_copy(model, only, {})
    copied = {id(whole.get_submodule(path)): id(m) for path, m in model.named_modules()}
    modules = [(path, m) for path, m in whole.named_modules() if only is None or copied[id(m)] in only]
    before = {(id(m), name): (t, t._version) for _, m in modules for name, t in _own(m).items()}
    # As models are built: each module by its own class, children first, then what the model does to all of them.
    for initialise in (_reset_parameters, getattr(whole, "_init_weights", None)):
        if callable(initialise):
            for path, module in reversed(modules):
                with torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(derived_seed(INIT_SEED, path))
                    initialise(module)
    first: dict[int, torch.Tensor] = {}  # of a tied tensor the first module's
    names = []
    for path, own in model.named_modules(remove_duplicate=False):
        module = whole.get_submodule(path)
        after = _own(module)
        for name, tensor in _own(own).items():
            names.append((f"{path}.{name}" if path else name, id(tensor)))
            if not tensor.is_meta:
                first[id(tensor)] = tensor.detach()
            elif (id(module), name) in before and _is_written(after.get(name), *before[id(module), name]):
                first.setdefault(id(tensor), after[name].detach())
    return {name: first[tensor] for name, tensor in names if tensor in first}


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


def _own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _unwritten_copy(model: nn.Module, only: Container[int] | None, made: dict[int, nn.Module]) -> nn.Module:
    """A copy whose tensors were never written, nor are tied; on meta outside `only`. `made`: copies by their id."""
    if id(model) in made:
        return made[id(model)]
    made[id(model)] = alone = copy.copy(model)
    fresh = _unwritten if only is None or id(model) in only else _on_meta
    alone._modules = {
        name: None if child is None else _unwritten_copy(child, only, made) for name, child in model._modules.items()
    }
    alone._parameters = {
        name: None if p is None else nn.Parameter(fresh(p), p.requires_grad) for name, p in model._parameters.items()
    }
    alone._buffers = {name: None if b is None else fresh(b) for name, b in model._buffers.items()}
    return alone


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("meta")


def _unwritten(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, _blank(tensor.dtype), device="cpu") if tensor.is_meta else tensor.detach().clone()


def _blank(dtype: torch.dtype) -> float:
    """What no initialiser would write; bool has no such value."""
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min


def _is_written(tensor: torch.Tensor | None, blank: torch.Tensor, version: int) -> bool:
    """Whether an initialiser gave the tensor, which was `blank` at `version`, all its values."""
    if tensor is None or tensor.is_meta:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return not bool(tensor.isnan().any())  # through .data versions do not count
    return tensor is not blank or tensor._version != version or bool((tensor != _blank(tensor.dtype)).any())
