"""Networks by name, other libraries' too: ``timm:resnet50``, ``torchvision:mobilenet_v2``.

A library is imported when one of its networks is asked for, not before. What timm makes of the Hub,
``timm:hf-hub:OWNER/NAME``, has one of timm's own names as well, and that is what files say of it:
no file makes anybody ask the Hub.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mssar.extras import advice
from mssar.networks import registry
from mssar.networks.hub import UNREACHABLE, quiet, trouble
from mssar.networks.recalibration import OURS
from mssar.networks.registry import NETWORKS, Architecture
from mssar.options import defaults
from mssar.surgery import initial
from mssar.surgery.heads import classes
from mssar.surgery.insertion import insert

Colours: TypeAlias = tuple[float, float, float]
IMAGENET: tuple[Colours, Colours] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LIBRARIES = {"timm": "timm", "torchvision": "images"}  # and the extras that bring them
RECALIBRATIONS = ("none", "se", "mssar")
WHERE = "blocks"  # where layers are inserted, where nobody says
SEVERAL = ("googlenet", "inception_v3")
DEFAULTS: dict[str, Any] = {"reduction": "auto"}
# torchvision's ResNet-50 as Keras has it, for weights from there: pixels less their mean alone.
KERAS, MEAN = "resnet50_keras", (123.68 / 255, 116.779 / 255, 103.939 / 255)


@dataclass(frozen=True)
class Foreign:
    """What is particular to a network of another library, as an ``Architecture`` says of ours."""

    library: str
    name: str  # there
    num_classes: int = 1000
    size: tuple[int, int, int] = (3, 224, 224)
    mean: Colours = IMAGENET[0]  # what pixels from 0 to 1 are normalised by
    std: Colours = IMAGENET[1]


def is_foreign(name: object) -> bool:
    """Whether a name says which library a network is from."""
    return isinstance(name, str) and ":" in name


def is_elsewhere(name: object) -> bool:
    """Whether a name says where timm finds a network: on the Hub, or in a folder."""
    return isinstance(name, str) and name.startswith("timm:") and ":" in name[5:]


def architecture(name: str) -> Architecture | Foreign:
    """The description of a network by its name."""
    if not is_foreign(name):
        return registry.architecture(name)
    library, short = require_library(name)
    return _describe_timm(short) if library == "timm" else _describe_torchvision(short)


def require_library(name: str) -> tuple[str, str]:
    """The library that a name says, and the rest; the library itself need not be there."""
    library, _, short = name.partition(":")
    if library not in LIBRARIES or not short:
        known = " or ".join(f"{known}:NAME" for known in LIBRARIES)
        raise ValueError(f"no network {name!r}: those of other libraries are {known}")
    return library, short


def build(
    name: str,
    recalibration: str = "none",
    num_classes: int | None = None,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    source: str = "",
    note: Mapping[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """A network by its name, ours or another library's.

    Args:
        name: as :func:`mssar.create_model` takes it, or ``timm:NAME`` or ``torchvision:NAME``.
        recalibration: of another library's "none", or "se" or "mssar", which are inserted.
        num_classes: the network's own number by default.
        tensors: a state dict that it begins with; see :func:`mssar.surgery.initial.fit`. Where
            layers of ours are wanted and are not in it, it is loaded first and they are inserted.
        source: what these tensors are called where they do not fit.
        note: what is known of them, as in :class:`mssar.networks.weights.Weights`: where it is not
            what is built, a misfit is told by that.
        options: of the recalibration, as :func:`mssar.insert` takes them.
    """
    if not is_foreign(name):
        made: nn.Module = registry.create_model(name, recalibration, num_classes, **options)
        if tensors is not None:
            _begin(made, name, recalibration, options, tensors, source, note)
        return made
    require_insertable(name, recalibration)
    before = tensors is not None and not initial.recalibrated(tensors)
    otherwise = _otherwise(note, name, recalibration, options, before=before)
    with torch.device("cpu"):  # not all of them can be made without numbers
        made = bare(name, num_classes)
        if tensors is not None and before:
            initial.fit(made, tensors, source, otherwise)
        if recalibration != "none":
            insert(made, **_inserting(recalibration, options))
        if tensors is not None and not before:
            initial.fit(made, tensors, source, otherwise)
    return made


def _begin(
    model: nn.Module,
    name: str,
    recalibration: str,
    options: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    source: str,
    note: Mapping[str, Any] | None,
) -> None:
    """Fill a network of ours; from one without our layers by way of an insertion."""
    inserted = recalibration in OURS and options.get("stage") != "single"
    before = inserted and not initial.recalibrated(tensors)
    otherwise = _otherwise(note, name, recalibration, options, before=before)
    if not before:
        initial.fit(model, tensors, source, otherwise)
        return
    plain = registry.create_model(name, "none", classes(model))
    plain.fc.load_state_dict(model.get_submodule("fc").state_dict())  # where it stays fresh
    initial.fit(plain, tensors, source, otherwise)
    insert(plain, **_inserting(recalibration, options))
    model.load_state_dict(plain.state_dict())  # the names are the same


def _otherwise(
    note: Mapping[str, Any] | None,
    name: str,
    recalibration: str,
    options: Mapping[str, Any],
    *,
    before: bool,
) -> str | None:
    """What is built, and what a file's note says that is something else; None where nothing is.

    With tensors from ``before`` layers are inserted, the network alone has to be the note's.
    """
    if note is None:
        return None
    made, wanted = f"{name} with {recalibration!r}", []
    if note["network"] != name:
        wanted.append(f"network {note['network']}")
    if not before:
        same = note["recalibration"] == recalibration
        if not same:
            wanted.append(f"recalibration {note['recalibration']}")
        usual = _usual(name, recalibration)
        given = {k: v for k, v in options.items() if same and v != usual.get(k)}
        ours = _usual(note["network"], note["recalibration"]) | given
        theirs = {"where": WHERE} | note["options"]
        other = [k for k, v in theirs.items() if k in ours and _listed(v) != _listed(ours[k])]
        wanted += [f"{k}={_said(theirs[k])}" for k in other]
        if same and other:
            made += " and " + " ".join(f"{k}={_said(ours.get(k))}" for k in other)
    return f"{made}: ask for {', '.join(map(initial.readable, wanted))}" if wanted else None


def _usual(name: str, recalibration: str) -> dict[str, Any]:
    """The options of a network of ours or another library's, without asking that; of one that is
    not known here the layer's own."""
    known = NETWORKS.get(name)
    own = DEFAULTS if is_foreign(name) else known.defaults if known else {}
    found = defaults(recalibration, staged=True)
    return {"where": WHERE} | found | {k: v for k, v in own.items() if k in found}


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _said(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def require_insertable(name: str, recalibration: str) -> None:
    if recalibration not in RECALIBRATIONS:
        raise ValueError(
            f"into {name} goes one of {', '.join(RECALIBRATIONS)}; {recalibration!r} is for the "
            f"networks of mssar"
        )


def pretrained(name: str) -> dict[str, Tensor]:
    """The weights that a library has for its network, downloaded as it does that."""
    if not is_foreign(name):
        raise ValueError(f"pretrained weights are those of another library; {name} needs a file")
    library, short = require_library(name)
    if not is_elsewhere(name):
        _ = architecture(name)  # a name that is not there is another mistake
    module = imported(library)
    try:
        with _tensors_alone(), quiet():
            if library == "timm":
                made = module.create_model(short, pretrained=True)
            else:
                made = module.models.get_model(short, weights="DEFAULT")
    except Exception as error:  # of a network, a disk, a hub, a file; whatever it is, one line
        reason = trouble(error)
        other = "; a file of weights needs none" if reason.startswith(UNREACHABLE) else ""
        raise ValueError(f"{library} cannot bring weights of {short}: {reason}{other}") from None
    found: dict[str, Tensor] = made.state_dict()
    return found


@contextmanager
def _tensors_alone() -> Iterator[None]:
    """Whatever a library asks of ``torch.load``, nothing in a file is run. torchvision asks for a
    pickle, and does not look at the checksum of a file that lies in its cache already."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def imported(library: str) -> Any:
    """A library, or one line that says how to get it."""
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise ValueError(
            f"{library} cannot be imported ({error}): {advice(LIBRARIES[library])}"
        ) from None
    except RuntimeError as error:  # of a torchvision that does not fit the torch that is installed
        reason = str(error).splitlines()[0]
        raise ValueError(f"{library} cannot be imported: {reason}") from None


def _inserting(recalibration: str, options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if name != "stage"}
    return {"scales": (1,), **given} if recalibration == "se" else given


def bare(name: str, num_classes: int | None = None, **arguments: Any) -> nn.Module:
    """A network by its name, without weights and with nothing inserted.

    ``arguments`` are what else its library, or :func:`mssar.create_model`, makes it with.
    """
    if not is_foreign(name):
        return registry.create_model(name, "none", num_classes, **arguments)
    chosen = architecture(name)
    assert isinstance(chosen, Foreign)
    module = imported(chosen.library)
    with_classes = {"num_classes": chosen.num_classes if num_classes is None else num_classes}
    if chosen.library == "timm":
        made: nn.Module = module.create_model(
            chosen.name, pretrained=False, **with_classes, **arguments
        )
        return made
    keras = chosen.name == KERAS
    short = "resnet50" if keras else chosen.name
    made = module.models.get_model(short, weights=None, **with_classes, **arguments)
    if keras:
        _as_in_keras(made)
    return made


class _Hollow(TorchFunctionMode):
    """Parameters take no memory, but other tensors have their numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def hollow(name: str, num_classes: int | None = None, **arguments: Any) -> nn.Module:
    """As :func:`bare`, but to look at: its parameters take no memory."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return bare(name, num_classes, **arguments)
        except NotImplementedError:  # torchvision's RegNets compute their widths with tensors
            with _Hollow():
                return bare(name, num_classes, **arguments)


def require_room(name: str, tensors: Mapping[str, Tensor], **arguments: Any) -> None:
    """That a network has no more numbers than the tensors that are to fill it: a few bytes must not
    make anybody build a network of gigabytes."""
    needed = sum(t.numel() for t in hollow(name, **arguments).state_dict().values())
    there = sum(t.numel() for t in tensors.values())
    if needed > there:
        raise ValueError(f"{name} has {needed:,} numbers, and here are {there:,}")


def _as_in_keras(model: Any) -> None:
    """The stride of a stage in its first 1×1 convolution, and another eps."""
    for stage in (model.layer2, model.layer3, model.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3


def _describe_timm(short: str) -> Foreign:
    timm = imported("timm")
    if ":" in short:
        raise ValueError(f"{short} says where a network lies, which `mssar train --from` takes")
    if "/" in short:
        raise ValueError(f"timm has no network {short!r}; one of the Hub is timm:hf-hub:{short}")
    if not timm.is_model(short):
        raise _unknown("timm", short, timm.list_models())
    try:
        found = timm.get_pretrained_cfg(short)
    except RuntimeError as error:  # of a tag, as in resnet50.nobody
        tags = [name for name in timm.list_pretrained() if name.startswith(short.split(".")[0])]
        raise ValueError(f"timm: {error} {_close(short, tags)}".rstrip()) from None
    if found is None:
        return Foreign("timm", short)
    channels, height, width = found.input_size
    return Foreign(
        "timm", short, found.num_classes, (channels, height, width), found.mean, found.std
    )


def elsewhere(name: str) -> Foreign:
    """Of ``timm:hf-hub:OWNER/NAME`` or ``timm:local-dir:FOLDER``, whose configuration timm reads:
    what it is by a name of timm's own."""
    timm, short = imported("timm"), name.removeprefix("timm:")
    try:
        with torch.random.fork_rng(devices=[]), quiet(), torch.device("meta"):
            made = timm.create_model(short, pretrained=False)
        found = made.pretrained_cfg
        (channels, height, width), mean, std = found["input_size"], found["mean"], found["std"]
        own, count = found["architecture"], found["num_classes"]
    except KeyError as error:
        raise ValueError(f"timm cannot make {short}: its configuration has no {error}") from None
    except Exception as error:  # of a network, a disk, a hub, a file; whatever it is, one line
        raise ValueError(f"timm cannot make {short}: {trouble(error)}") from None
    usual = hollow(f"timm:{own}", made.num_classes).state_dict()
    if {n: t.shape for n, t in made.state_dict().items()} != {n: t.shape for n, t in usual.items()}:
        raise ValueError(
            f"{short} is a {own} with arguments of its own, which no record could name"
        )
    return Foreign("timm", own, count, (channels, height, width), tuple(mean), tuple(std))


def _describe_torchvision(short: str) -> Foreign:
    if short == KERAS:  # which is known without torchvision
        return Foreign("torchvision", KERAS, mean=MEAN, std=(1.0, 1.0, 1.0))
    models = imported("torchvision").models
    known = [*models.list_models(module=models), KERAS]  # those that classify
    if short not in known:
        raise _unknown("torchvision", short, known)
    if short in SEVERAL:
        raise ValueError(f"{short} of torchvision has several outputs in training; take another")
    best = models.get_model_weights(short).DEFAULT
    how, count = best.transforms(), len(best.meta["categories"])
    side = how.crop_size[0]
    return Foreign("torchvision", short, count, (3, side, side), tuple(how.mean), tuple(how.std))


def _unknown(library: str, short: str, names: list[str]) -> ValueError:
    return ValueError(f"{library} has no network {short!r}{_close(short, names)}")


def _close(name: str, names: list[str]) -> str:
    found = get_close_matches(name, names, 3, 0.4)
    return f"; close to it: {', '.join(found)}" if found else ""
