"""Put MS-SAR into a network that is there already, and take it out again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from mssar.branch import Branch
from mssar.cost import require_size, run_hollow, tensors
from mssar.layer import MSSAR
from mssar.scales import Strategy
from mssar.surgery import optimisers
from mssar.surgery.ends import LAYER, Carrier, DenseEnd, Holder, InPlace, Recalibrated
from mssar.surgery.families import CARRIERS, Place, class_name, has_own, own_forward
from mssar.surgery.measure import map_sizes, timed
from mssar.surgery.plan import Entry, Plan, entry
from mssar.surgery.where import Found, Where, places

Init: TypeAlias = Literal["identity", "random"]

# Where classes come from that have a network in them, and make another or copies of it.
WRAPPERS = ("torch._dynamo", "torch.nn.parallel", "torch.distributed", "torch.optim.")
REPLACES = "the output changes: the squeeze-and-excitations that learned are gone"


def insert(
    model: nn.Module,
    scales: Sequence[int] = (1, 2, 4),
    *,
    strategy: Strategy = "regional",
    reduction: int | Literal["auto"] = "auto",
    where: Where = "blocks",
    init: Init = "identity",
    backend: str = "auto",
    optimizer: Optimizer | None = None,
    size: tuple[int, int, int] | None = None,
    dry_run: bool = False,
    measure: bool = False,
) -> Plan:
    """Put an :class:`mssar.MSSAR` into every block of a network, which computes what it did before.

    Args:
        model: changed in place. Known are the blocks of torchvision's and timm's ResNets,
            ResNeXts, Wide ResNets, RegNets, DenseNets, MobileNetV2, V3 and V4, EfficientNets
            and ConvNeXts, of timm's ResNetV2s, Res2Nets, ResNeSts, SKNets, SENets and GENets,
            and of this package's networks.
        scales: of every layer, as for :class:`mssar.MSSAR`; so are ``strategy`` and ``backend``.
        reduction: "auto" is 16 in blocks that end wide (bottlenecks, RegNets, ConvNeXts), else 1.
        where: "blocks"; "se", in the place of every squeeze-and-excitation; names of modules or
            patterns of them (``"layer[34].*"``), whose maps are recalibrated; a class of them; or
            a function of name and module that says whether.
        init: with "identity" the network's output does not change by the act, and the layers learn
            from the first step; with "random" they begin as in a new network.
        optimizer: gains the new parameters, matrices in the group of the weights beside them and
            vectors in that of the norms.
        size: C, H, W of an image, to count multiply-adds and to measure with; by default what the
            network's configuration says, else 224×224, or 32×32 after a first layer of stride 1.
        dry_run: only say what would be done.
        measure: also measure the time before and after, on the device the network is on.

    Returns:
        What was done; it prints as a table.
    """
    _require_kinds(model, optimizer)
    _require_whole(model)
    _require_whose(model, optimizer)
    if measure and any(tensor.is_meta for _, tensor in tensors(model)):
        raise ValueError("measure=True needs a network with numbers; this one is on 'meta'")
    if init not in ("identity", "random"):
        raise ValueError(f"init is 'identity' or 'random'; got {init!r}")
    chosen = places(model, where)
    _require_own(model, chosen, init)
    shape = image_size(model) if size is None else require_size(size)
    maps, uncounted = map_sizes(model, chosen, shape)
    if uncounted and size is not None and size[0] != image_size(model, by_stem=True)[0]:
        uncounted = f"{uncounted} (size is C, H, W of an image)"
    if uncounted and size is None:  # made for other colours than its configuration says
        other = image_size(model, by_stem=True)[0], *shape[1:]
        again, still = map_sizes(model, chosen, other)
        if not still:
            shape, maps, uncounted = other, again, still
    # What is only planned draws no numbers that the caller would miss.
    with torch.random.fork_rng(_gpus(model), enabled=dry_run):
        layers: dict[str, MSSAR] = {}
        entries: list[Entry] = []
        for name, place in chosen.items():
            block = model.get_submodule(name)
            few = place.reduction if reduction == "auto" else reduction
            made = _layer(block, place, scales, strategy, few, backend)
            layers[name] = made
            note = REPLACES if place.replaces and init == "identity" else ""
            entries.append(entry(block, name, place, made, maps.get(name, []), note))
        plan = Plan(
            type(model).__name__, tuple(entries), layers[next(iter(layers))].scales, shape,
            sum(p.numel() for p in model.parameters()), _macs(model, shape) if maps else None,
            done=not dry_run, before=timed(model, shape) if measure else None, uncounted=uncounted,
        )  # fmt: skip
        subject = deepcopy(model) if dry_run and measure else model
        if not dry_run or measure:
            joining = None if dry_run else optimizer
            beside = {name: [*model.get_submodule(name).parameters()] for name in chosen}
            with optimisers.renaming(joining, model):
                for name, place in chosen.items():
                    put(subject, name, place, layers[name], init)
                _carry(subject)
                if joining is not None:
                    optimisers.join(joining, [(layers[name], beside[name]) for name in chosen])
        return replace(plan, after=timed(subject, shape)) if measure else plan


def remove(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Take out what :func:`insert` put in: modules, names and numbers are what they were.

    What was trained since stays as it is, but for the layers; an ``optimizer`` forgets them. One
    that is not given here keeps their parameters, which no longer do anything.
    """
    _require_kinds(model, optimizer)
    held = holders(model)
    if not held:
        raise ValueError(f"nothing was inserted into this {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, (Holder, Carrier)):
            _require_ours(name, module)
    for name, holder in held.items():
        _require_as_inserted(name, holder)
    with optimisers.renaming(optimizer, model):
        for holder in held.values():
            if holder.doubled:
                holder.fold(0.5)
            if optimizer is not None:
                optimisers.leave(optimizer, holder.recalibrate)
            if isinstance(holder, Recalibrated):
                _exchange(model, holder, holder.inner)
            elif isinstance(holder, InPlace):
                assert holder.replaced is not None
                _exchange(model, holder, holder.replaced.to(holder.gain).train(holder.training))
            else:
                _restore(holder)
    for module in model.modules():
        if isinstance(module, Carrier):
            module.__class__ = type(module).__bases__[-1]


def _require_ours(name: str, module: nn.Module) -> None:
    """Refuse what was made another class since: it would become what it no longer is."""
    kind = type(module)
    if not kind.__module__.startswith("mssar."):
        raise ValueError(
            f"{name!r} is a {kind.__name__} of {kind.__module__} by now, as after fully_shard or a "
            "parametrisation; remove before that. Nothing was changed"
        )


def _require_as_inserted(name: str, holder: Holder) -> None:
    """Refuse what cannot be put back."""
    if isinstance(holder, InPlace):
        there = holder.replaced is not None and (
            holder.gain.is_meta or not any(t.is_meta for _, t in tensors(holder.replaced))
        )
        if not there:  # it is in no file, and is not moved with the network
            raise ValueError(
                f"what stood in the place of {name!r} was not saved with this network, and cannot "
                "be put back. Nothing was changed"
            )
    for doubled in holder.doubled:
        owner, _, tensor = doubled.rpartition(".")
        try:
            there = has_own(holder.get_submodule(owner), tensor)
        except AttributeError:
            there = False
        if not there:
            raise ValueError(
                f"{name!r} has no longer the {' and '.join(holder.doubled)} that insert doubled, "
                "as after fusing for deployment, pruning, quantising, or another layer around it; "
                "remove before that. Nothing was changed"
            )


def holders(model: nn.Module) -> dict[str, Holder]:
    """What holds the inserted layers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Holder)}


def put(model: nn.Module, name: str, place: Place, layer: MSSAR, init: Init) -> None:
    """Put a layer into its place."""
    born = init == "identity"
    if born:
        for branch in cast("Sequence[Branch]", layer.branches):
            nn.init.zeros_(branch.norm2.weight)  # every weight is ½,
            nn.init.zeros_(branch.norm2.bias)
    target = model.get_submodule(place.target(name))
    holder: Holder
    if place.end is not None:
        holder = _exchange_class(target, place, layer)
        holder.doubled = place.doubled if born else ()
    elif place.replaces:
        target.zero_grad()  # an optimiser that still has them leaves them alone
        holder = InPlace(target, layer, 2.0 if born else 1.0)
        _exchange(model, target, holder)
    else:
        doubled = tuple(n.removeprefix(f"{place.inside}.") for n in place.doubled) if born else ()
        gain = 2.0 if born and not doubled else None
        holder = Recalibrated(target, layer, place.last, gain)
        holder.doubled = tuple(f"inner.{n}" for n in doubled)
        _exchange(model, target, holder)
    if holder.doubled:
        holder.fold(2.0)  # and of twice the map


def _exchange_class(block: Any, place: Place, layer: MSSAR) -> Holder:
    assert place.end is not None
    block.__dict__["before"] = block._modules.get(LAYER)  # an Identity, in our own networks
    block.__dict__["others"] = tuple(name for name, _ in block.named_parameters())
    block.__class__ = place.end()
    assert isinstance(block, Holder)
    block.join(layer.train(block.training))
    return block


def _restore(block: Any) -> None:
    block.__class__ = type(block).__bases__[-1]
    before = block.__dict__.pop("before")
    if before is None:
        delattr(block, LAYER)
    else:
        setattr(block, LAYER, before)
    del block.doubled
    block.__dict__.pop("others", None)  # pickled whole by an earlier version, it has none


def _exchange(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever it stands."""
    inside = set(new.modules())
    for parent in [m for m in model.modules() if m not in inside or m is old]:
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def _carry(model: nn.Module) -> None:
    for module in model.modules():
        carrier = CARRIERS.get(class_name(module))
        steps = any(isinstance(m, DenseEnd) for m in module.children())
        if carrier is not None and steps and own_forward(module):
            module.__class__ = carrier()


def _layer(
    block: nn.Module,
    place: Place,
    scales: Sequence[int],
    strategy: Strategy,
    few: int,
    backend: str,
) -> MSSAR:
    """A layer for a place, where its block is, in the type of its products, which norms need not
    have, and with norms of its kind."""
    floating = [p for p in block.parameters() if p.is_floating_point()]
    products = [p for p in floating if p.ndim > 1]
    like = next(iter([*products, *floating]), torch.empty(0))
    layer = MSSAR(
        place.channels, scales, strategy, few, place.context, backend=backend,
        device=like.device, dtype=like.dtype,
    )  # fmt: skip
    for norm in block.modules():
        if isinstance(norm, nn.SyncBatchNorm):
            group = norm.process_group
            converted: MSSAR = nn.SyncBatchNorm.convert_sync_batchnorm(layer, group)
            return converted
    return layer


def image_size(model: nn.Module, by_stem: bool = False) -> tuple[int, int, int]:
    """Of the images a network was made for, as far as it says; or as its first layer looks."""
    for name in ("pretrained_cfg", "default_cfg"):
        said = getattr(model, name, None)
        size = said.get("input_size") if isinstance(said, Mapping) else None  # as timm has it
        if size and not by_stem:
            c, h, w = size
            return c, h, w
    stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if stem is None:
        return 3, 224, 224
    # Small images are not made smaller at once; nor are ImageNet's by torchvision's VGGs.
    theirs = any(kind.__module__.startswith("torchvision.") for kind in type(model).__mro__)
    side = 32 if stem.stride == (1, 1) and not theirs else 224
    return stem.in_channels, side, side


def _gpus(model: nn.Module) -> list[torch.device]:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def _macs(model: nn.Module, shape: tuple[int, int, int]) -> int:
    return run_hollow(model, shape).get("Global", 0) // 2


def _require_kinds(model: object, optimizer: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a torch.nn.Module; got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is a torch.optim.Optimizer; got {type(optimizer).__name__}")


def _require_whose(model: nn.Module, optimizer: Optimizer | None) -> None:
    """With another network's, as of a copy, the layers would be all that is trained."""
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):  # since torch 2.9
        raise ValueError(
            "torch's Muon takes matrices alone, and layers have convolutions and norms: pass the "
            "optimizer that trains the network's own"
        )
    if optimizer is None or not any(p.requires_grad for p in model.parameters()):
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            "optimizer has none of this network's parameters: pass the one that trains it, or "
            "insert first and make the optimizer from model.parameters()"
        )


def _require_own(model: nn.Module, chosen: Found, init: Init) -> None:
    """Refuse what has a recalibration already where ours would be, and what two blocks have in
    common: it would be doubled for both, or by both."""
    named: dict[int, str] = {}
    for name, place in chosen.items():
        target = place.target(name)
        block = model.get_submodule(target)
        other = named.setdefault(id(block), target)
        if other != target:
            raise ValueError(f"{other!r} and {target!r} are one module; name one of them")
        there = block._modules.get(LAYER)
        if place.end is not None and not isinstance(there, nn.Identity | None):
            raise ValueError(
                f"{name!r} was made with a recalibration, {type(there).__name__}, whose place the "
                "layer would take; insert is for networks without"
            )
    if init != "identity":
        return
    uses = Counter(id(tensor) for _, tensor in tensors(model))
    uses.update(id(m) for parent in model.modules() for m in parent._modules.values())
    for name, place in chosen.items():
        target = place.target(name)
        for its in place.doubled:
            part: Any = model.get_submodule(target)
            for step in its.removeprefix(f"{place.inside}.").split("."):
                part = getattr(part, step)
                if uses[id(part)] > 1:
                    raise ValueError(
                        f"{'.'.join(filter(None, (name, its)))!r} has another use, for which "
                        "init='identity' would double it too; leave it out by where"
                    )


def _require_whole(model: nn.Module) -> None:
    """Refuse what has no modules any more, or has had the layer put in."""
    kind = type(model).__name__
    if isinstance(model, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise ValueError(f"a {kind} is a traced network; insert into the one it was traced from")
    for name, module in model.named_modules():
        origin = type(module).__module__
        if origin.startswith(WRAPPERS):
            raise ValueError(f"insert into the network before {type(module).__name__} wraps it")
        # A FloatFunctional adds what may be quantised some day.
        quantised = origin.startswith(("torch.ao.nn.", "torch.nn.quantized"))
        if quantised and type(module).__name__ != "FloatFunctional":
            raise ValueError(f"{name!r} is a quantised {type(module).__name__}: insert before that")
        if any(isinstance(t, UninitializedParameter) for t in module.parameters(recurse=False)):
            raise ValueError(f"{name!r} is not initialised yet: run the network once before")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise ValueError(
                f"{name!r} was made under torch.inference_mode and cannot be changed; insert into "
                "copy.deepcopy(model), made outside of it"
            )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "insert outside torch.inference_mode: what is made under it cannot be trained"
        )
    inserted = list(holders(model))
    if inserted:
        raise ValueError(
            f"MS-SAR was put into this {kind} already ({len(inserted)} layer"
            f"{'s' * (len(inserted) > 1)}, the first in {inserted[0]!r}); mssar.remove(model) "
            "takes it out"
        )
    made = [name for name, module in model.named_modules() if isinstance(module, MSSAR)]
    if made:
        raise ValueError(
            f"this {kind} was made with {len(made)} MSSAR in it, the first {made[0]!r}; insert is "
            "for networks without"
        )
