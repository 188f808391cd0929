"""Networks that layers were inserted into as folders that others can load, and ours as before.

The layout is that of :mod:`mssar.networks.sharing`. The configuration says how the network is made
before the insertion, and ``options`` are what :func:`mssar.insert` is told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mssar.layer import MSSAR
from mssar.networks import sharing
from mssar.networks.card import public
from mssar.networks.classifier import Classifier
from mssar.networks.hub import needed
from mssar.networks.sharing import Place, Record
from mssar.networks.weights import require_finite
from mssar.surgery import foreign
from mssar.surgery.ends import Holder, InPlace, Recalibrated
from mssar.surgery.families import known
from mssar.surgery.heads import classes
from mssar.surgery.insertion import holders, insert

# What a network may be made with; more would be a stranger's to say, such as files to load.
ARGUMENTS = {
    "timm": (
        *("num_classes", "in_chans", "global_pool", "output_stride"),
        *("drop_rate", "drop_path_rate"),
    ),
    "torchvision": ("num_classes", "dropout", "stochastic_depth_prob"),
    "mssar": ("num_classes", "in_chans"),
}
OPTIONS = ("scales", "strategy", "reduction", "where", "init")
SIZES = ("num_classes", "in_chans")  # those that take memory
PLAIN = (bool, int, float, str, type(None))


def save_pretrained(
    model: nn.Module,
    folder: Place,
    record: Record = None,
    name: str | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    repo_id: str | None = None,
    push_to_hub: bool = False,
    **how: Any,
) -> Path:
    """Write a network into a folder: one of :func:`mssar.create_model`, or of timm or torchvision,
    with what :func:`mssar.insert` put into it.

    Args:
        model: the network, on any device.
        folder: where; made if it is not there, and files of these names are replaced.
        record: a run's record, or its file or folder, to fill the card from.
        name: what the network was made by, ``timm:NAME`` or ``torchvision:NAME``; the record's by
            default; timm's networks know theirs, and ours all there is to know.
        arguments: what it was made with, but for ``num_classes``, which is looked up.
        repo_id: its name on the Hub, for the card; the folder's name by default.
        push_to_hub: whether to put it there, too; ``how`` are options of :func:`push_to_hub`.
    """
    found = sharing.recorded(record)
    config = described(model, found, name, arguments)
    return sharing.save(model, Path(folder), config, found, repo_id, push_to_hub, how)


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    record: Record = None,
    name: str | None = None,
    *,
    arguments: Mapping[str, Any] | None = None,
    **how: Any,
) -> str:
    """Put a network on the Hub as ``owner/name``, and return the address of the commit.

    ``private``, ``token``, ``commit_message``, ``branch`` and ``create_pr`` are the Hub's; the rest
    is as for :func:`save_pretrained`.
    """
    needed("huggingface_hub", "push_to_hub")  # before the work
    found = sharing.recorded(record)
    config = described(model, found, name, arguments)
    return sharing.push(repo_id, config, sharing.contents(model), found, **how)


def from_pretrained(source: Place, **how: Any) -> nn.Module:
    """A network from a folder of :func:`save_pretrained`, or by its name on the Hub; in ``eval``.

    Args:
        source: a folder, or ``owner/name``.
        how: of the Hub's download: ``revision``, ``token``, ``cache_dir``, ``local_files_only``
            and ``force_download``.
    """
    place, config = sharing.opened(source, **how)
    if "arguments" not in config:
        return sharing.load(place, config)
    try:
        library = _library(config.get("network"))
    except ValueError as error:
        raise sharing.undescribed(place, error) from None
    if library in foreign.LIBRARIES:
        foreign.imported(library)  # where it is missing, that is all there is to say
    with sharing.fitting(place):
        found = sharing.weights_of(place)
        require_finite(found.tensors, sharing.WEIGHTS)
    try:
        _require_arguments(config["network"], config["arguments"])
        foreign.require_room(config["network"], found.tensors, **config["arguments"])
        made = foreign.bare(config["network"], **config["arguments"])
        if config["recalibration"] != "none":
            insert(made, **_told(config["options"]))
        for holder in holders(made).values():
            if isinstance(holder, InPlace):
                holder.__dict__["replaced"] = None  # it is in no file
    except Exception as error:  # it may say anything
        raise sharing.undescribed(place, error) from None
    with sharing.fitting(place):
        made.load_state_dict(found.tensors)
    made.__dict__["note"] = found.note
    return made.eval()


def described(
    model: nn.Module,
    record: Mapping[str, Any] | None = None,
    name: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration that a network can be made from again; a ValueError where there is none."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a network; got a {type(model).__name__}")
    held = holders(model)
    if isinstance(model, Classifier) and not held:
        config = sharing.config_of(model)
        if name not in (None, config["network"]) or arguments:
            raise ValueError(
                "name and arguments are for networks of timm and torchvision; this "
                f"{type(model).__name__} knows that it is {config['network']!r}"
            )
        return config
    origin = model.origin if isinstance(model, Classifier) else None
    said = (
        name or (_said(record, "network") if origin is None else origin["network"]) or _known(model)
    )
    if said is None:
        raise ValueError(
            f"name is what this {type(model).__name__} was made by, as in "
            "name='torchvision:resnet18' or 'timm:resnet50'; none was given"
        )
    network = _own_name(model, said)
    if not isinstance(arguments, Mapping | None):
        raise ValueError(f"arguments is a mapping; got {type(arguments).__name__}")
    given = dict(arguments or {})
    if origin is not None:
        given = {"in_chans": origin["in_chans"], **given}
    features = getattr(model, "num_classes", None) == 0  # no head, as timm has it
    given.setdefault("num_classes", 0 if features else classes(model))
    _require_arguments(network, given)
    with torch.random.fork_rng(devices=[]):  # it may be saved in the midst of training
        made = foreign.bare(network, **given)
        options = _inserted(model, held, made) if held else {}
        if held:
            insert(made, **_told(options))
    if different := _difference(made, model):
        raise ValueError(
            f"this {type(model).__name__} is not what {network} makes with {given} and insert: "
            f"{different}; what else it was made with, as in_chans, goes into arguments"
        )
    kind = "mssar" if held else "none"
    if options.get("scales") == [1] and _said(record, "recalibration") == "se":
        kind = "se"
    config = {"library": "mssar", "network": network, "recalibration": kind, "options": options}
    if said != network:
        config["source"] = public(said)
    return config | {"arguments": given, "num_classes": given["num_classes"]}


def _inserted(model: nn.Module, held: Mapping[str, Holder], plain: nn.Module) -> dict[str, Any]:
    """What :func:`insert` was told. Blocks are listed: which ones are known may change."""
    layers = [holder.recalibrate for holder in held.values()]
    first, reductions = layers[0], {layer.reduction for layer in layers}
    if not isinstance(first.strategy, str):
        raise ValueError(
            f"this {type(model).__name__} has coordinate sets of your own, {first.strategy!r:.60}, "
            "which no configuration can describe"
        )
    where: str | list[str] = "se"
    if not any(isinstance(holder, InPlace) for holder in held.values()):
        where = _places(held, plain)
    return {
        "scales": list(first.scales),
        "strategy": first.strategy,
        "reduction": reductions.pop() if len(reductions) == 1 else "auto",
        "where": where,
        "init": "identity" if any(map(_born, held.values())) else "random",
    }


def _places(held: Mapping[str, Holder], plain: nn.Module) -> list[str]:
    """Blocks by their names where no other layer is in them, else their modules. Where layers are
    of several reductions, which a configuration says as "auto", a block must have its usual one."""
    blocks, alike = {}, len({holder.recalibrate.reduction for holder in held.values()}) == 1
    for name, module in plain.named_modules():
        if (place := known(module)) is not None:
            blocks[place.target(name)] = name, place.reduction
    found = []
    for target, holder in held.items():
        block, usual = blocks.get(target, (target, None))
        alone = not any(name.startswith(f"{block}.") for name in held if name != target)
        same = alike or usual == holder.recalibrate.reduction
        found.append(block if alone and same else target)
    return found


def _born(holder: Holder) -> bool:
    """Whether it began as the identity."""
    gain = getattr(holder, "gain", None)
    return bool(holder.doubled) or (gain is not None and gain.item() != 1)


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """For :func:`insert`, as a configuration has it."""
    found = dict(options)
    if extra := found.keys() - set(OPTIONS):
        raise ValueError(f"insert is told {', '.join(OPTIONS)}; not {min(extra)!r:.60}")
    if isinstance(found.get("where"), list):
        names = found["where"]
        found["where"] = lambda name, module: name in names  # noqa: ARG005, names, not patterns
    return found


def _require_arguments(network: Any, arguments: Any) -> None:
    """Known and plain."""
    taken = ARGUMENTS[_library(network)]
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments is a mapping; got {type(arguments).__name__}")
    for name, value in arguments.items():
        if name not in taken:
            raise ValueError(f"{network} is shared with {', '.join(taken)}; not {name!r:.60}")
        if type(value) not in PLAIN:
            raise ValueError(f"{name} is a number or a word; got {value!r:.60}")
        if name in SIZES and (type(value) is not int or value < 0):
            raise ValueError(f"{name} is a whole number; got {value!r:.60}")


def _library(network: Any) -> str:
    """The library of a network by its name. Of timm's own: others lie where anybody wrote them."""
    if not isinstance(network, str):
        raise ValueError(f"a network has a name; got {network!r:.60}")
    if not foreign.is_foreign(network):
        return "mssar"
    library, short = foreign.require_library(network)
    if ":" in short:
        raise ValueError(f"{network!r:.200} is no network of {library}'s own")
    return library


def _said(record: Mapping[str, Any] | None, what: str) -> Any:
    """Of a record's run."""
    run = None if record is None else record.get("run")
    return run.get(what) if isinstance(run, Mapping) else None


def _known(model: nn.Module) -> str | None:
    """What timm says of its networks."""
    said = getattr(model, "pretrained_cfg", None)
    if not isinstance(said, Mapping) or not said.get("architecture"):
        return None
    tag = said.get("tag")
    return f"timm:{said['architecture']}{f'.{tag}' if tag else ''}"


def _own_name(model: nn.Module, name: str) -> str:
    """A name of timm's own for what came from the Hub or a folder."""
    if foreign.is_foreign(name) and ":" in foreign.require_library(name)[1]:
        said = getattr(model, "pretrained_cfg", None)
        if isinstance(said, Mapping) and said.get("architecture"):
            return f"timm:{said['architecture']}"
    return name


def _difference(made: nn.Module, model: nn.Module) -> str:
    """The first thing in which two networks differ that matters when they are used."""
    expected, found = _looks(made), _looks(model)
    for name in [*expected, *(name for name in found if name not in expected)]:
        a, b = expected.get(name), found.get(name)
        if a != b:
            where = name or "the network"
            return f"{where} is {b or 'not there'}, and would be {a or 'not there'}"
    shapes, own = ({n: tuple(t.shape) for n, t in m.state_dict().items()} for m in (made, model))
    for name in [*shapes, *(name for name in own if name not in shapes)]:
        if shapes.get(name) != own.get(name):
            return f"{name} has {own.get(name)}, and would have {shapes.get(name)}"
    return ""


def _looks(model: nn.Module) -> dict[str, str]:
    """Every module's kind, and what else shows of those that hold no others."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, MSSAR):
            what = (module.scales, module.strategy, module.reduction, module.context_channels)
            found[name] = f"{kind}{what}"
        elif isinstance(module, (nn.BatchNorm2d, nn.SyncBatchNorm)):  # either can be the other
            found[name] = f"BatchNorm2d({module.num_features}, eps={module.eps})"
        elif isinstance(module, Recalibrated):
            found[name] = f"{kind}(last={module.last}, doubled={module.doubled})"
        elif isinstance(module, nn.modules.dropout._DropoutNd) or hasattr(module, "drop_prob"):
            continue  # of training alone
        elif next(module.children(), None) is None:
            found[name] = re.sub(r",? ?inplace=(True|False)", "", repr(module))
        else:
            found[name] = kind
    return found
