"""Where in a network layers are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from inspect import signature
from typing import TypeAlias

from torch import nn

from mssar.surgery.families import (
    KNOWN,
    SQUEEZES,
    Place,
    known,
    squeeze,
    wrapped,
)

Where: TypeAlias = str | Iterable[str] | type[nn.Module] | Callable[[str, nn.Module], bool]
Found: TypeAlias = dict[str, Place]
FEW = 5
ASKED = (
    "where is 'blocks', 'se', names of modules, a class of them, or a function of name and module"
)


def places(model: nn.Module, where: Where) -> Found:
    """A place for a layer in each module that is meant, by the module's name."""
    modules = dict(model.named_modules())
    kind = type(model).__name__
    if isinstance(where, str) and where == "blocks":
        if blocks := _all(modules, known):
            return blocks
        named = _example(modules)
        example = f", as in where={named!r}" if named else ""
        raise ValueError(
            f"nothing to recalibrate in this {kind}: {_unknown(model)} of {KNOWN}; where names the "
            f"modules whose maps are meant{example}"
        )
    if isinstance(where, str) and where == "se":
        if squeezes := _all(modules, squeeze):
            return squeezes
        kinds = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in SQUEEZES))
        raise ValueError(f"nothing to replace in this {kind}: it has no {kinds}")
    if isinstance(where, type):
        names = [n for n, m in modules.items() if n and isinstance(m, _module_class(where))]
        if not names:
            raise ValueError(f"nothing to recalibrate: this {kind} has no {where.__name__}")
    elif callable(where):
        _require_two(where)
        names = [name for name, module in modules.items() if where(name, module)]
        if not names:
            raise ValueError(
                f"nothing to recalibrate: where(name, module) was true for none of the "
                f"{len(modules)} modules of this {kind}"
            )
    elif isinstance(where, Iterable):
        names = _named([where] if isinstance(where, str) else list(where), modules)
    else:
        raise ValueError(f"{ASKED}; got {where!r}")
    chosen = {name: _place(name, modules[name]) for name in names}
    for name in chosen:
        for other in chosen:
            if other.startswith(f"{name}.") or (not name and other):
                raise ValueError(f"{other!r} lies in {name or 'the network'!r}; name one of them")
    return chosen


def _example(modules: dict[str, nn.Module]) -> str | None:
    """A module whose map is meant, rather than a classifier's or a gate's: the last norm's, or
    that of the last convolution that looks around."""
    norms = [n for n, m in modules.items() if n and isinstance(m, nn.BatchNorm2d)]
    convs = {n: m for n, m in modules.items() if n and isinstance(m, nn.Conv2d)}
    around = [n for n, m in convs.items() if m.kernel_size == (3, 3)]
    return next((names[-1] for names in (norms, around, list(convs)) if names), None)


def _module_class(kind: type) -> type[nn.Module]:
    if not issubclass(kind, nn.Module):
        raise ValueError(f"{ASKED}; got the class {kind.__name__}")
    return kind


def _require_two(where: Callable[..., object]) -> None:
    try:
        taken = signature(where)
    except (TypeError, ValueError):  # some of C have none
        return
    try:
        taken.bind("name", "module")
    except TypeError:
        raise ValueError(f"{ASKED}, as in lambda name, module: …; got one of {taken}") from None


def _all(modules: dict[str, nn.Module], find: Callable[[nn.Module], Place | None]) -> Found:
    found = {name: _told(find, name, module) for name, module in modules.items()}
    return {name: place for name, place in found.items() if place is not None}


def _told(find: Callable[[nn.Module], Place | None], name: str, module: nn.Module) -> Place | None:
    """What is wrong with a block, with its name."""
    try:
        return find(module)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def _unknown(model: nn.Module) -> str:
    """What is there instead of known blocks, but for the libraries' common parts."""
    kinds = dict.fromkeys(
        type(module).__name__
        for module in model.modules()
        if module is not model
        and module._modules
        and not type(module).__module__.startswith(("torch.", "torchvision.ops.", "timm.layers."))
    )
    if not kinds:
        return "it has no block"
    more = f" and {len(kinds) - FEW} more" if len(kinds) > FEW else ""
    return f"it has {', '.join(list(kinds)[:FEW])}{more}, and no block"


def _place(name: str, module: nn.Module) -> Place:
    place = _told(known, name, module)
    if place is not None:
        return place
    if not name:
        raise ValueError("the network itself is no place for a layer; name a module in it")
    made = _told(lambda inner: wrapped(inner, ""), name, module)
    assert made is not None
    return made


def _named(patterns: list[str], modules: dict[str, nn.Module]) -> list[str]:
    """Modules by names or patterns; of what a pattern fits, the known blocks if there are any."""
    found: dict[str, None] = {}
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ValueError(f"{ASKED}; got {pattern!r} among the names")
        fits = [name for name in modules if name and fnmatchcase(name, pattern)]
        blocks = [name for name in fits if _told(known, name, modules[name]) is not None]
        if not fits:
            close = get_close_matches(pattern, [n for n in modules if n], 3, 0.4)
            hint = f"; close to it: {', '.join(close)}" if close else ""
            raise ValueError(f"no module is named {pattern!r}{hint}")
        found.update(dict.fromkeys(blocks or fits))
    if not found:
        raise ValueError("where names no modules")
    return list(found)
