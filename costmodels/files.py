"""Dataclasses from YAML and JSON files, every value checked against its field's type."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml

from costmodels.errors import BadInput


def read_mapping(file: Path, what: str) -> dict[str, Any]:
    """The mapping that a file holds. Raises BadInput, with the line, where it holds none: it is not `what`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise BadInput(f"{file}: cannot be read: {reason}") from None
    try:
        # YAML 1.1 takes the 1e-05 of JSON for a string
        values = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else getattr(error, "lineno", None)
        raise BadInput(f"{file}: neither YAML nor JSON{f', see line {line}' if line else ''}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file}: not {what}: expected a mapping, got {values!r:.40}")
    return values


class Unlike(Exception):
    """A value is not what belongs in this place."""


T = TypeVar("T")


def typed(kind: type[T], value: object, where: str) -> T:
    """`value` (of mappings, lists and scalars) as a dataclass, tuple, mapping or scalar of that type."""
    made = _dataclass(kind, value, where) if is_dataclass(kind) else _other(kind, value, where)
    return cast(T, made)


def _dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise Unlike(f"{where or 'the file'} is {value!r:.40}, not a mapping")
    hints = get_type_hints(kind)
    made = {}
    for field in fields(kind):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            made[field.name] = typed(hints[field.name], value[field.name], path)
        elif field.default is MISSING:
            raise Unlike(f"{path} is missing")
    return kind(**made)


def _other(kind: Any, value: object, where: str) -> object:
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(typed(args[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {typed(args[0], k, where): typed(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin in (Union, types.UnionType):
        if any(option is type(None) if value is None else option is type(value) for option in args):
            return value
        return typed(next(option for option in args if option is not type(None)), value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        if value not in (known := [one.value for one in kind]):
            raise Unlike(f"{where} is {value!r:.40}, none of {', '.join(known)}")
        return kind(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise Unlike(f"{where} is {value!r:.40}, not {getattr(kind, '__name__', kind)}")
