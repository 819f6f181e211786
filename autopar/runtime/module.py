"""The base class of generated modules: parameters with a layout, and randomness that every rank agrees on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.runtime import mesh
from autopar.runtime.layout import I, Layout, Placement, S


class _Namespace(nn.Module):
    """What stands at the dots of a name: `attn` in attn.c_attn.weight, also `0` in net.0.weight (self.net[0])."""

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(str(index))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)


class _UserNamesWin(type):
    """Once built, what a module holds hides methods of its class: many models have `self.blocks`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        module = super().__call__(*args, **kwargs)
        held = (*module._modules, *module._parameters, *module._buffers)
        if hidden := {name: _held(name) for name in held if hasattr(cls, name)}:
            # a class of its own, since properties see what `fully_shard` puts in the place of a parameter
            module.__class__ = type(cls)(cls.__name__, (cls,), hidden | {"__module__": cls.__module__})
        return module


def _held(name: str) -> property:
    """Gives the child, parameter or buffer of that name."""

    def get(module: nn.Module) -> nn.Module | Tensor | None:
        return next(held[name] for held in (module._modules, module._parameters, module._buffers) if name in held)

    return property(get)


def method(module: nn.Module, name: str) -> Callable[..., Any]:
    """The module's method, also where something that it holds has the same name."""
    found = next(one for kind in type(module).__mro__ if callable(one := vars(kind).get(name)))
    return partial(found, module)


class ShardedModule(nn.Module, metaclass=_UserNamesWin):
    """A module that holds this rank's part of each parameter, under the user's own names.

    Shapes given are those of the whole tensors; what is allocated is this rank's slice over the axis "tp".
    """

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[str, Layout] = {}
        self._buffer_layouts: dict[str, Layout] = {}
        self._aliases: dict[str, str] = {}
        self._sharded_blocks: list[nn.Module] = []
        self._path = ""

    def __getitem__(self, index: int) -> nn.Module:
        """A numbered child: the user's model may be a Sequential itself."""
        return self.get_submodule(str(index))

    def parameter(
        self,
        name: str,
        *shape: int,
        tp: Placement = I,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = True,
    ) -> None:
        """Register a parameter of the whole `shape`; a dotted name makes the modules on its way.

        I: the same on all tp ranks, with the same gradient. R: the same, with partial gradients, summed over tp once
        per step. S(d, k): this rank's slice.
        """
        layout = Layout(shape, tp)
        parameter = nn.Parameter(torch.empty(_local_shape(layout), dtype=dtype), requires_grad=requires_grad)
        owner, leaf = self._owner(name, new=True)
        owner._parameters[leaf] = parameter  # register_parameter refuses names of methods
        self._layouts[name] = layout

    def buffer(
        self,
        name: str,
        *shape: int,
        tp: Placement = I,
        dtype: torch.dtype = torch.float32,
        persistent: bool = True,
    ) -> None:
        """Register a buffer of the whole `shape`. It holds nan (0 for integers) until it is loaded."""
        layout = Layout(shape, tp)
        value = torch.full(_local_shape(layout), float("nan") if dtype.is_floating_point else 0, dtype=dtype)
        owner, leaf = self._owner(name, new=True)
        owner._buffers[leaf] = value
        if not persistent:
            owner._non_persistent_buffers_set.add(leaf)
        self._buffer_layouts[name] = layout

    def blocks(self, path: str, modules: Sequence[nn.Module] | Mapping[int, nn.Module]) -> None:
        """Register the model's repeated blocks under `path` ("": the model itself), by position or by number.

        Each is a unit of ZeRO: its parameters are gathered, and their gradients reduced, together.
        """
        numbered = dict(modules) if isinstance(modules, Mapping) else dict(enumerate(modules))
        owner, leaf = self._owner(path)
        holder = owner._modules.get(leaf) if path else self
        if holder is None:
            in_order = list(numbered) == list(range(len(numbered)))
            holder = owner._modules[leaf] = nn.ModuleList() if in_order else _Namespace()
        for number, module in numbered.items():
            holder.add_module(str(number), module)
            self._sharded_blocks.append(module)

    def alias(self, name: str, of: str) -> None:
        """A second name of a parameter (tied weights): it stands in the full state dict and has no storage."""
        self._aliases[name] = of

    def normalizers(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Sums over the rows of `inputs` that the loss divides by; `forward` gets them summed over the global batch."""
        return ()

    @contextmanager
    def rng(self, site: int, axes: Sequence[str] = ()) -> Iterator[None]:
        """Draw random numbers that depend on seed, step, microbatch, this module, `site` and the data-parallel rank.

        Equal on the ranks of every other axis but those in `axes`. The generator is left as it was found.
        """
        at = _randomness
        places = [(name, mesh.axis(name).rank) for name in axes]
        if (dp := mesh.axis_or_none("dp")) is not None:
            places.append(("dp", dp.rank))
        seed = derived_seed(at.seed, at.step, at.microbatch, self._path, site, sorted(set(places)))
        generator = _default_generator(mesh.current().device)
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)

    def layouts(self) -> dict[str, Layout]:
        """The layout over tp of every parameter, by its full name, blocks included."""
        return _collected(self, "_layouts")

    def buffer_layouts(self) -> dict[str, Layout]:
        """The same for buffers."""
        return _collected(self, "_buffer_layouts")

    def aliases(self) -> dict[str, str]:
        """Every alias and the parameter that it names, by full names."""
        return {
            _join(path, name): _join(path, of)
            for path, module in self.named_modules()
            if isinstance(module, ShardedModule)
            for name, of in module._aliases.items()
        }

    def _owner(self, name: str, new: bool = False) -> tuple[nn.Module, str]:
        """The module that holds what `name` names, made where it is missing, and the last part of the name."""
        if new and (name in self._layouts or name in self._buffer_layouts):
            raise ValueError(f"{name} is registered twice")
        *path, leaf = name.split(".")
        owner: nn.Module = self
        for part in path:
            child = owner._modules.get(part)
            if child is None:
                child = owner._modules[part] = _Namespace()
            owner = child
        return owner, leaf


def recompute(block: Callable[..., Any], *args: Any) -> Any:
    """`block(*args)`, its activations computed again in backward instead of kept; random masks come out the same."""
    at = _randomness

    def run(*args: Any) -> Any:
        with randomness(at):
            return block(*args)

    return checkpoint(run, *args, use_reentrant=False)


@dataclass(frozen=True)
class Randomness:
    """Which part of the training random numbers are drawn for."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0


_randomness = Randomness()


@contextmanager
def randomness(at: Randomness) -> Iterator[None]:
    """Draw for this part of the training inside."""
    global _randomness
    before, _randomness = _randomness, at
    try:
        yield
    finally:
        _randomness = before


def derived_seed(*parts: object) -> int:
    """A 63-bit seed that is a pure function of what `parts` print, in every process and version."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def name_modules(model: nn.Module) -> None:
    """Tell each module its place in the model: it is part of the seeds of its random numbers."""
    for path, module in model.named_modules():
        if isinstance(module, ShardedModule):
            module._path = path


def sharded_blocks(model: nn.Module) -> list[nn.Module]:
    """All modules registered with `blocks`, inner ones before those that hold them."""
    found = [
        block for module in model.modules() if isinstance(module, ShardedModule) for block in module._sharded_blocks
    ]
    return found[::-1]


def _local_shape(layout: Layout) -> tuple[int, ...]:
    if not isinstance(layout.placement, S):
        return layout.shape
    tp = mesh.axis_or_none("tp")
    rank, ranks = (tp.rank, tp.size) if tp else (0, 1)
    shape = layout.local_shape(rank, ranks)
    if 0 in shape and 0 not in layout.shape:
        raise ValueError(f"{layout.placement!r} of {list(layout.shape)} leaves nothing for rank {rank} of {ranks}")
    return shape


def _collected(model: nn.Module, what: str) -> dict[str, Layout]:
    return {
        _join(path, name): layout
        for path, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, layout in getattr(module, what).items()
    }


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator
