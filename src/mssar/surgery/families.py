"""Which blocks are known, and where in each of them the layer belongs.

A class is known by where it is defined and its name, so that nothing need be installed or imported
to look for it; a subclass may have another forward, and is not taken for its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, TypeAlias, cast

from torch import Tensor, nn

from mssar.branch import hooked

REDUCTION = 16  # SENet's; with 1 a ResNet-50 grows from 25.6 to 65.9 million parameters
WIDE = 256  # channels from which on a module of an unknown kind is taken for a wide end
# Modules that end in a product by their weight, and perhaps a sum with their bias.
SCALED = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d, nn.GroupNorm)
# Modules whose output is no map N C H W, though they say how many channels it has.
OTHERWISE = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d),
    *(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.InstanceNorm3d),
)
FROZEN = "torchvision.ops.misc.FrozenBatchNorm2d"
SCALED_ELSEWHERE = (FROZEN, "timm.layers.norm.GroupNorm", "timm.layers.norm.GroupNorm1")
SCALED_AND_ACTING = tuple(
    f"timm.layers.norm_act.{name}"
    for name in ("BatchNormAct2d", "SyncBatchNormAct", "FrozenBatchNormAct2d", "GroupNormAct")
)
Exchange: TypeAlias = Callable[[], type[nn.Module]]  # a class of ours, imported when it is needed


@dataclass(frozen=True)
class Place:
    """Where a layer goes: a block that gets another class, or a module in it that is wrapped.

    Modules and tensors are named from the block.
    """

    channels: int
    reduction: int
    end: Exchange | None = None  # the class of ours
    inside: str = ""  # else what is wrapped; the block itself where this is empty
    last: bool = False  # what is wrapped makes N H W C
    replaces: bool = False  # the layer stands for it, instead of after it
    norm: str | None = None  # the BN that precedes the layer
    between: tuple[str, ...] = ()  # what comes between the layer and the shortcut
    activation: str | None = None  # after the shortcut, where our class has both; "": it is relu
    doubled: tuple[
        str, ...
    ] = ()  # tensors that double the map, so that weights of ½ change nothing
    context: int | None = None  # channels of the map that the weights come from, if it is another

    def target(self, name: str) -> str:
        """The module that is changed, in a network in which the block has this name."""
        return ".".join(filter(None, (name, self.inside)))


def wrapped(block: nn.Module, name: str, reduction: int | None = None) -> Place:
    """Wrap a module named from a block; the block itself where the name is empty.

    One that does not say how many channels it makes, as an EvoNorm, has those of the convolution
    before it.
    """
    its = block.get_submodule(name)
    last = its
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if isinstance(last, OTHERWISE):
        raise ValueError(f"a {type(last).__name__} makes no map N C H W, which the layer takes")
    channels = channels_of(its) or _channels_before(block, name)
    if channels is None:
        raise ValueError(
            f"a {type(its).__name__} does not say how many channels it makes; name the convolution "
            "or norm after which the layer belongs"
        )
    return Place(
        channels,
        reduction or usual_reduction(channels),
        inside=name,
        norm=name if isinstance(its, (nn.BatchNorm2d, nn.SyncBatchNorm)) else None,
        doubled=_from(name, foldable(its)),
    )


def _channels_before(block: nn.Module, name: str) -> int | None:
    """Of the last convolution that stands before a module of a block."""
    found = None
    for other, module in block.named_modules():
        if other == name:
            return found
        if isinstance(module, nn.Conv2d):
            found = module.out_channels
    return None


def usual_reduction(channels: int) -> int:
    return REDUCTION if channels >= WIDE else 1


def channels_of(module: nn.Module) -> int | None:
    """Of the map that a module makes, by its attributes; a Sequential's by its last that tells."""
    if (place := known(module)) is not None:
        return place.channels
    for name in ("num_features", "out_channels", "num_channels"):
        found = getattr(module, name, None)
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    if class_name(module) == FROZEN:
        return cast("Tensor", module.weight).numel()
    if type(module).__name__ in ("LayerNorm2d", "LayerNormAct2d"):  # of N C H W
        shape: tuple[int, ...] = getattr(module, "normalized_shape", ())
        return shape[0] if len(shape) == 1 else None
    if isinstance(module, nn.Sequential):
        return next(filter(None, map(channels_of, reversed(list(module)))), None)
    return None


def foldable(module: nn.Module) -> tuple[str, ...]:
    """The tensors of a module which, doubled, double what it makes; none where they do not."""
    if hooked(module):  # which may make its tensors, as pruning does, or change what it makes
        return ()
    if type(module) is nn.Sequential and len(module):
        return _from(str(len(module) - 1), foldable(module[-1]))
    acts = class_name(module) in SCALED_AND_ACTING
    if acts and not all(type(m) in (nn.Identity, nn.ReLU) for m in module.children()):
        return ()
    if not acts and type(module) not in SCALED and class_name(module) not in SCALED_ELSEWHERE:
        return ()
    found = tuple(name for name in ("weight", "bias") if has_own(module, name))
    return found if "weight" in found else ()


def has_own(module: nn.Module, tensor: str) -> bool:
    """Whether it can be changed: one that a module makes anew at every call cannot."""
    return {**module._parameters, **module._buffers}.get(tensor) is not None


def _from(module: str, tensors: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(".".join(filter(None, (module, name))) for name in tensors)


def _of(library: str, name: str) -> Exchange:
    def load() -> type[nn.Module]:
        found: type[nn.Module] = getattr(import_module(f"mssar.surgery.{library}"), name)
        return found

    return load


# Blocks whose class is exchanged, to end in the tail; their parameters keep their names.


def _ending(
    end: Exchange, norm: str, activation: str = "", *between: str
) -> Callable[[Any], Place]:
    def place(block: nn.Module) -> Place:
        wide = "Bottleneck" in type(block).__name__
        found = wrapped(block, norm, REDUCTION if wide else 1)
        above = (block.get_submodule(name) for name in _above(norm))
        if not found.doubled or any(map(hooked, above)) or not own_forward(block):
            return found  # with a gain, which our class has not; or what is hooked would be passed
        return replace(found, end=end, inside="", norm=norm, between=between, activation=activation)

    return place


def _above(name: str) -> Iterator[str]:
    """What a module lies in: a.b and a for a.b.c."""
    while name := name.rpartition(".")[0]:
        yield name


def _timm_regnet(block: Any) -> Place:
    if block.downsample is None:  # there is no shortcut
        return wrapped(block, "conv3.bn", REDUCTION)
    return _ending(_of("timm", "RegNetBottleneck"), "conv3.bn", "act3", "drop_path")(block)


def _dense(end: Exchange, block: Any) -> Place:
    new, main = block.conv2.out_channels, block.conv1.in_channels
    doubled = _from("conv2", foldable(block.conv2))
    if not doubled:
        raise ValueError(f"conv2 of a {type(block).__name__} is no plain convolution, or has hooks")
    if not own_forward(block):
        raise ValueError(f"a {type(block).__name__}'s forward was replaced; insert before that")
    return Place(new, 1, end=end, doubled=doubled, context=main)


# Blocks in which the last norm, or what else makes the residual, is wrapped.


def _narrow(name: str) -> Callable[[Any], Place]:
    return partial(wrapped, name=name, reduction=1)


def _wide(name: str) -> Callable[[Any], Place]:
    return partial(wrapped, name=name, reduction=REDUCTION)


def _bottleneck(name: str) -> Callable[[Any], Place]:
    """Blocks of one class that end wide, or narrow: it is their middle that tells."""

    def place(block: nn.Module) -> Place:
        last: Any = block.get_submodule(f"{name}.conv")
        narrow = last.out_channels < last.in_channels
        return wrapped(block, f"{name}.bn", 1 if narrow else REDUCTION)

    return place


def _conv_bn_act(block: Any) -> Place | None:
    return wrapped(block, "bn1", 1) if block.has_skip else None  # else a stem, or a head


def _universal(block: Any) -> Place:
    ends = not isinstance(block.dw_end, nn.Identity)
    return wrapped(block, "dw_end.bn" if ends else "pw_proj.bn", 1)


def _mobilenet_v2(block: Any) -> Place:
    return wrapped(block, f"conv.{len(block.conv) - 1}", 1)


def _inverted(block: Any) -> Place:
    return wrapped(block, f"block.{len(block.block) - 1}.1", 1)  # convolution, norm


def _cnblock(block: Any) -> Place:
    at = len(block.block) - 2  # a permutation follows
    last = block.block[at]
    doubled = () if hooked(block.block) else _from(f"block.{at}", foldable(last))
    return Place(last.out_features, REDUCTION, inside="block", doubled=doubled)


def _convnext(block: Any) -> Place:
    last = block.mlp.fc2
    return Place(
        last.out_channels if block.use_conv_mlp else last.out_features,
        REDUCTION,
        inside="mlp",
        last=not block.use_conv_mlp,
        doubled=() if hooked(block.mlp) else _from("mlp.fc2", foldable(last)),
    )


FAMILIES: dict[str, Callable[[Any], Place | None]] = {
    "torchvision.models.resnet.BasicBlock": _ending(
        _of("torchvision", "BasicBlock"), "bn2", "relu"
    ),
    "torchvision.models.resnet.Bottleneck": _ending(
        _of("torchvision", "Bottleneck"), "bn3", "relu"
    ),
    "torchvision.models.regnet.ResBottleneckBlock": _ending(
        _of("torchvision", "ResBottleneckBlock"), "f.c.1", "activation"
    ),
    "torchvision.models.densenet._DenseLayer": partial(_dense, _of("torchvision", "DenseLayer")),
    "torchvision.models.mobilenetv2.InvertedResidual": _mobilenet_v2,
    "torchvision.models.mobilenetv3.InvertedResidual": _inverted,
    "torchvision.models.efficientnet.MBConv": _inverted,
    "torchvision.models.efficientnet.FusedMBConv": _inverted,
    "torchvision.models.convnext.CNBlock": _cnblock,
    "timm.models.resnet.BasicBlock": _ending(
        _of("timm", "BasicBlock"), "bn2", "act2", "se", "drop_path"
    ),
    "timm.models.resnet.Bottleneck": _ending(
        _of("timm", "Bottleneck"), "bn3", "act3", "se", "drop_path"
    ),
    "timm.models.regnet.Bottleneck": _timm_regnet,
    "timm.models.regnet.PreBottleneck": _wide("conv3"),  # norms come first in these
    "timm.models.resnetv2.PreActBasic": _narrow("conv2"),
    "timm.models.resnetv2.PreActBottleneck": _wide("conv3"),
    "timm.models.resnetv2.Bottleneck": _wide("norm3"),
    "timm.models.res2net.Bottle2neck": _wide("bn3"),
    "timm.models.resnest.ResNestBottleneck": _wide("bn3"),
    "timm.models.sknet.SelectiveKernelBasic": _narrow("conv2.bn"),
    "timm.models.sknet.SelectiveKernelBottleneck": _wide("conv3.bn"),
    "timm.models.senet.SEResNetBlock": _narrow("bn2"),
    "timm.models.senet.SEResNetBottleneck": _wide("bn3"),
    "timm.models.senet.SEResNeXtBottleneck": _wide("bn3"),
    "timm.models.senet.SEBottleneck": _wide("bn3"),
    "timm.models.byobnet.BasicBlock": _narrow("conv2_kxk.bn"),
    "timm.models.byobnet.BottleneckBlock": _bottleneck("conv3_1x1"),
    "timm.models.byobnet.DarkBlock": _narrow("conv2_kxk.bn"),
    "timm.models.byobnet.EdgeBlock": _narrow("conv2_1x1.bn"),
    "timm.models.byobnet.SelfAttnBlock": _wide("conv3_1x1.bn"),
    "timm.models.densenet.DenseLayer": partial(_dense, _of("timm", "DenseLayer")),
    "timm.models._efficientnet_blocks.ConvBnAct": _conv_bn_act,
    "timm.models._efficientnet_blocks.DepthwiseSeparableConv": _narrow("bn2"),
    "timm.models._efficientnet_blocks.EdgeResidual": _narrow("bn2"),
    "timm.models._efficientnet_blocks.InvertedResidual": _narrow("bn3"),
    "timm.models._efficientnet_blocks.UniversalInvertedResidual": _universal,
    "timm.models._efficientnet_blocks.CondConvResidual": _narrow("bn3"),
    "timm.models.convnext.ConvNeXtBlock": _convnext,
    "mssar.networks.resnet.BasicBlock": _ending(_of("own", "BasicBlock"), "bn2"),
    "mssar.networks.resnet.Bottleneck": _ending(_of("own", "Bottleneck"), "bn3"),
    "mssar.networks.resnet.GroupedBottleneck": _ending(_of("own", "GroupedBottleneck"), "bn3"),
    "mssar.networks.densenet.DenseStep": partial(_dense, _of("own", "DenseStep")),
}
KNOWN = (
    "torchvision's or timm's ResNets, ResNeXts, Wide ResNets, RegNets, DenseNets, MobileNetV2, V3 "
    "and V4, EfficientNets and ConvNeXts, of timm's ResNetV2s, Res2Nets, ResNeSts, SKNets, SENets "
    "and GENets, or of mssar's networks"
)
CARRIERS: dict[str, Exchange] = {  # blocks of dense steps
    "torchvision.models.densenet._DenseBlock": _of("torchvision", "DenseBlock"),
    "timm.models.densenet.DenseBlock": _of("timm", "DenseBlock"),
}
SQUEEZES: dict[str, Callable[[Any], tuple[int, int]]] = {  # with channels outside and inside
    "timm.layers.squeeze_excite.SEModule": lambda m: (m.fc1.in_channels, m.fc1.out_channels),
    "timm.layers.squeeze_excite.EffectiveSEModule": lambda m: (
        m.fc.in_channels,
        m.fc.out_channels // 2,  # one product instead of two
    ),
    "timm.models._efficientnet_blocks.SqueezeExcite": lambda m: (
        m.conv_reduce.in_channels,
        m.conv_reduce.out_channels,
    ),
    "timm.models.senet.SEModule": lambda m: (m.fc1.in_channels, m.fc1.out_channels),
    "torchvision.ops.misc.SqueezeExcitation": lambda m: (m.fc1.in_channels, m.fc1.out_channels),
}


def squeeze(module: nn.Module) -> Place | None:
    """The place of a squeeze-and-excitation, for a layer that is about as wide inside."""
    find = SQUEEZES.get(class_name(module))
    if find is None:
        return None
    channels, inside = find(module)
    return Place(channels, max(1, round(channels / inside)), replaces=True)


def known(module: nn.Module) -> Place | None:
    """Where a layer goes in a block, if it is one that is known."""
    find = FAMILIES.get(class_name(module))
    return None if find is None else find(module)


def own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is the one that its class was written with: ours would take its
    place. What checks types may be around it and nothing else, as a decorator may change numbers.
    """
    kind = type(module)
    made: Any = kind.forward
    while _checks_types(made):
        made = made.__wrapped__
    written = made.__module__ == kind.__module__ and not hasattr(made, "__wrapped__")
    return written and "forward" not in module.__dict__


def _checks_types(made: Any) -> bool:
    file = getattr(getattr(made, "__code__", None), "co_filename", "")
    origin = getattr(made, "__globals__", {}).get("__name__") or ""
    return file.startswith("<@beartype(") or origin.startswith("jaxtyping.")


def class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
