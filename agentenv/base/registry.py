"""Registries of parts that a configuration chooses by name, from this project or another package.

    [algorithm]
    name = "arpo"                # one of ours
    name = "median"              # an installed package's: its entry point in agentenv.algorithms
    name = "my_code:Median"      # any class that can be imported

A part is a struct whose fields are the keys of its table; the base class of its kind defines its
methods. A `Registry` maps names to classes, and imports the file of a class only when its name is
selected. A configuration field that holds a part has the type `Registry.key`, which `decode_part`
decodes.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Generic, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec import inspect as mi

from agentenv.base.crashes import place_of
from agentenv.base.errors import AgentEnvError, ConfigError, reported_as

T = TypeVar("T", bound=Struct)

TAG = "name"  # the key of a table that names its part


def import_from_working_directory() -> None:
    """Import the user's modules from the working directory, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def loaded(path: str) -> Any:
    """Import 'module' or 'module:name'. Raises ConfigError with the cause, also for errors within
    the module.
    """
    module, _, name = path.partition(":")
    if "/" in module or module.endswith(".py"):
        stem = module.rpartition("/")[2].removesuffix(".py")
        raise ConfigError(
            f"expected the name of a module, not a path, such as {stem}:{name or 'Name'}"
        )
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (AgentEnvError, ImportError, AttributeError, ValueError) as error:
        where = ""
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        absent = missing and f"{module}.".startswith(f"{missing}.")
        if missing == module.partition(".")[0]:
            where = "; it must be installed, or be in the directory in which the command runs"
        if absent:
            where += _near_module(missing)
        why = f"{error}{place_of(error)}{where}"
        # A wrong name has no cause; a missing package that the module requires is one.
        raise ConfigError(why) from (None if absent else error)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{type(error).__name__}: {error}{place_of(error)}") from error


def _near_module(missing: str) -> str:
    """A suggestion with a similar name next to the missing module, unless another module imports
    the missing one."""
    parent, _, last = missing.rpartition(".")
    places = getattr(sys.modules.get(parent), "__path__", ()) if parent else sys.path
    known = [one.name for one in pkgutil.iter_modules(places)]
    near = difflib.get_close_matches(last, known, 1)
    return f"; did you mean '{parent and f'{parent}.'}{near[0]}'?" if near else ""


_entry_points: Any = cache(metadata.entry_points)  # reads a file of each installed package


def installed(group: str) -> Iterable[metadata.EntryPoint]:
    """The entry points of a group."""
    return cast(Iterable[metadata.EntryPoint], _entry_points().select(group=group))


def meant(name: str, known: Iterable[str], other: str = "", most: int = 1) -> str:
    """A suggestion of at most `most` known names that are similar, else `other`."""
    near = difflib.get_close_matches(name, list(known), most, 0.6 if most == 1 else 0.4)
    return f"did you mean {', '.join(near)}?" if near else other


def not_one_of(name: object, known: Sequence[str], other: str = "") -> str:
    """The error for an unknown name, with the nearest known one; `other` describes further
    accepted forms."""
    near = difflib.get_close_matches(str(name), known)
    near.sort(key=lambda one: sorted(one) != sorted(str(name)))  # swapped letters first
    hint = f"; did you mean {near[0]!r}?" if near else ""
    got = "which is missing" if name is None else f"got {name!r}{hint}"
    wanted = [f"one of {known}"] * bool(known) + [other] * bool(other)
    return f"expected {' or '.join(wanted)}, {got}"


class _Instances(type):
    """msgspec's check of a decoded part: whether it belongs to the registry."""

    registry: Registry[Any]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.registry.base)


class PartKey(metaclass=_Instances):
    """Base of the types of configuration fields that hold a part; see `Registry.key`."""


@dataclass(eq=False)
class Registry(Generic[T]):
    """Parts of one kind: `noun` names the kind in errors, `group` is the group of entry points,
    `base` the base struct of the parts, `own` the parts of this project, "module:Class" by name.
    `adapt` may convert a named object that is not such a struct to one, or return None."""

    noun: str
    group: str
    base: type[T]
    own: Mapping[str, str]
    adapt: Callable[[Any], type[T] | None] = lambda found: None

    def __post_init__(self) -> None:
        self._loaded: dict[str, type[T]] = {}
        self.key: type[Any] = type(f"Any{self.base.__name__}", (PartKey,), {"registry": self})

    def find(self, name: object) -> type[T]:
        """The struct of this name. Raises ConfigError, naming the nearest."""
        if isinstance(name, str) and name not in self._loaded:
            path = name if ":" in name else {**self._installed(), **self.own}.get(name)
            if path is not None:
                self._loaded[name] = self._load(name, path)
        if not isinstance(name, str) or name not in self._loaded:
            raise ConfigError(not_one_of(name, sorted(self.names()), "'module:Class'"))
        return self._loaded[name]

    def names(self) -> list[str]:
        """All known names: of this project, loaded ones, installed ones."""
        return list(self._known())

    def parts(self) -> list[type[T]]:
        """All known structs, this project's first; imports them. Raises ConfigError for a broken
        part."""
        return [self.find(name) for name in self._known()]

    def _known(self) -> dict[str, Any]:
        return {**self.own, **self._loaded, **self._installed()}

    def decode(self, raw: object) -> T:
        """A part from its table. Raises ValueError, msgspec's ValidationError, and ConfigError."""
        if not isinstance(raw, dict):
            raise ValueError(f"Expected `object`, got `{type(raw).__name__}`")
        return msgspec.convert(raw, self.find(raw.get(TAG)), dec_hook=decode_part)

    def _load(self, name: str, path: str) -> type[T]:
        problem = f"{self.noun} {name!r}: {path} cannot be loaded"
        with reported_as(ConfigError, problem, ConfigError):
            part: Any = loaded(path)
        if not (isinstance(part, type) and issubclass(part, self.base)):
            part = self.adapt(part)
        if part is None:
            base = f"{self.base.__module__}.{self.base.__qualname__}"
            raise ConfigError(f"{self.noun} {name!r}: {path} is not derived from {base}")
        config = part.__struct_config__
        if config.tag == name and config.tag_field == TAG:
            return cast(type[T], part)
        own = {"tag": name, "tag_field": TAG, "module": part.__module__}
        return cast(type[T], msgspec.defstruct(part.__name__, [], bases=(part,), **own))

    @cache  # noqa: B019 - registries live as long as the process
    def _installed(self) -> dict[str, str]:
        """Paths "module:Class" by name. Raises ConfigError where two packages claim a name."""
        found: dict[str, str] = {}
        for point in installed(self.group):
            if found.setdefault(point.name, point.value) != point.value:
                raise ConfigError(
                    f"{self.noun} {point.name!r} is registered by two packages, as {point.value} "
                    f"and {found[point.name]}; uninstall one of them"
                )
        return found


def decode_part(kind: type, raw: Any) -> Any:
    """msgspec's hook for fields of the type `Registry.key`."""
    if issubclass(kind, PartKey):
        return kind.registry.decode(raw)
    raise NotImplementedError(f"no field of a configuration has the type {kind}")


type_info = cache(mi.type_info)  # costs milliseconds, and some envs call it repeatedly


def marks_of(kind: mi.Type) -> dict[str, Any]:
    """The marks of a key's type, from Meta(extra=...)."""
    return kind.extra or {} if isinstance(kind, mi.Metadata) else {}


def struct_types(kind: mi.Type, *, loads: bool = True) -> list[mi.StructType]:
    """The structs of a type: several for a tagged union or a registry, none for a plain value.
    Without `loads`, the base represents the parts of a registry."""
    registry = registry_of(kind)
    if registry is not None:
        return [struct_type(part) for part in (registry.parts() if loads else [registry.base])]
    kind = unwrap(kind)
    if isinstance(kind, mi.UnionType):
        return [struct for part in kind.types for struct in struct_types(part, loads=loads)]
    return [kind] if isinstance(kind, mi.StructType) else []


def struct_type(struct: type[msgspec.Struct]) -> mi.StructType:
    """The fields of a struct, as msgspec describes them."""
    return cast(mi.StructType, type_info(struct))


def registry_of(kind: mi.Type) -> Registry[Any] | None:
    """The registry of a field of this type; None if it does not hold a part."""
    kind = unwrap(kind)
    found = kind.types if isinstance(kind, mi.UnionType) else (kind,)
    keys = [one.cls for one in map(unwrap, found) if isinstance(one, mi.CustomType)]
    return keys[0].registry if keys and issubclass(keys[0], PartKey) else None


def unwrap(kind: mi.Type) -> mi.Type:
    """A type without its annotations."""
    return unwrap(kind.type) if isinstance(kind, mi.Metadata) else kind


def element(kind: mi.Type) -> mi.Type:
    """The type of the entries of a table or list; other types themselves."""
    bare = unwrap(kind)
    if isinstance(bare, mi.DictType):
        return bare.value_type
    return bare.item_type if isinstance(bare, mi.ListType | mi.VarTupleType) else kind


def tag_field_of(kind: mi.Type) -> str:
    """The key that selects the kind of a table; empty if there is only one kind."""
    if registry_of(kind) is not None:
        return TAG
    structs = struct_types(kind)
    return str(structs[0].tag_field) if len(structs) > 1 else ""


def choices_of(kind: mi.Type) -> list[str]:
    """The allowed texts of a key; empty if it is not restricted."""
    kind = unwrap(kind)
    kinds = [*map(unwrap, kind.types if isinstance(kind, mi.UnionType) else [kind])]
    texts = [str(value) for one in kinds if isinstance(one, mi.LiteralType) for value in one.values]
    is_switch = texts and any(isinstance(one, mi.BoolType) for one in kinds)
    return [*texts, "true", "false"] if is_switch else texts


def type_at(kind: mi.Type, key: str) -> mi.Type:
    """The type of a key; AnyType in a list or below a user-chosen name."""
    for part in key.split("."):
        fields = [field for struct in struct_types(kind) for field in struct.fields]
        kind = next((one.type for one in fields if one.encode_name == part), mi.AnyType())
    return kind


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
