"""Options that several verbs share, and that a verb takes as one value.

Typer makes an option of each parameter of a function. A parameter that is annotated with a
:class:`Group` stands for all options of the group: :func:`grouped` shows typer a signature in which
they are written out in its place, and calls the verb with what they make.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import Parameter
from typing import Annotated, Any, get_args, get_type_hints

import typer

from mssar.lab.commands import parse

Verb = Callable[..., None]


@dataclass(frozen=True)
class Group:
    options: tuple[Parameter, ...]
    gather: Callable[[dict[str, Any]], Any]  # from the options' values to the verb's


@dataclass(frozen=True)
class Flag:
    """An option of :func:`changes`."""

    kind: Any
    help: str
    example: str = ""  # of several numbers


def grouped(verb: Verb) -> Verb:
    """A verb as typer is to see it."""
    taken = inspect.signature(verb, eval_str=True).parameters.values()
    groups: dict[str, Group] = {}
    options: list[Parameter] = []
    for parameter in taken:
        if group := next((g for g in get_args(parameter.annotation) if isinstance(g, Group)), None):
            groups[parameter.name] = group
            options += group.options
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def called(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group.gather({o.name: values.pop(o.name) for o in group.options})
        verb(**values)

    called.__name__, called.__doc__ = verb.__name__, verb.__doc__
    called.__annotations__ = {option.name: option.annotation for option in options}
    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return called


def options_of(kind: type[Any], *only: str, but: str = "") -> Group:
    """The fields of a dataclass, annotated as typer has it; the others have their defaults."""
    hints = get_type_hints(kind, include_extras=True)
    options = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
        if f.name in (only or hints) and f.name != but
    ]
    return Group(tuple(options), lambda values: kind(**values))


def changes(flags: Mapping[str, Flag], panel: str | None = None) -> Group:
    """Options without defaults: what was given is a dictionary, each of its flag's kind."""
    parsers = {tuple[int, ...]: parse.integers, tuple[float, float]: parse.pair}

    def option(name: str, flag: Flag) -> Parameter:
        kind: Any = str if flag.kind in parsers else flag.kind
        said = typer.Option(help=flag.help, rich_help_panel=panel, show_default=False)
        annotated: Any = Annotated[kind | None, said]
        return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=annotated)

    def gather(values: dict[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in values.items() if value is not None}
        for name, text in found.items():
            if parser := parsers.get(flags[name].kind):
                found[name] = parser(name, text, flags[name].example)
        return found

    return Group(tuple(option(name, flag) for name, flag in flags.items()), gather)
