"""Networks of one kind as a single one, side by side in their channels.  G networks.

A small network leaves a large GPU mostly idle, and several on streams of their own still pay for
every kernel: on an H200 a convolution of 16 channels takes 77 µs forward and backward, eight of
them as one grouped convolution take 151 µs. So G networks become one with G times the channels.
Norms have G times the channels, convolutions G groups; a matrix that must stay one (a classifier's,
a recalibration's, which fused kernels read as they are) is block-diagonal. Others' recalibrations
are left as they are, each with its network's channels. A network's numbers are what they would be
by itself, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mssar.branch import Branch
from mssar.lab.engine.step import drops
from mssar.layer import MSSAR
from mssar.networks.cifar_resnet import CifarResNet
from mssar.networks.resnet import BasicBlock

if TYPE_CHECKING:
    from jaxtyping import Float

# Modules in which channels meet in the leaves alone.
HOLDERS = (CifarResNet, BasicBlock, Branch, MSSAR, nn.Sequential, nn.ModuleList, nn.Identity)
LEAVES = (nn.Conv2d, nn.BatchNorm2d, nn.Linear)
VECTOR = 8  # channels that are read at once: fewer of an input are filled up with empty ones

Part = tuple[slice, ...]


class Beside(nn.ModuleList):
    """The networks' modules for maps of C channels, each with its own network's."""

    def forward(self, x: Float[Tensor, "N GC H W"]) -> Float[Tensor, "N GC H W"]:
        own = x.chunk(len(self), 1)
        return torch.cat([module(part) for module, part in zip(self, own, strict=True)], 1)


def obstacle(networks: Sequence[nn.Module]) -> str | None:
    """Why networks cannot be one; None if they can."""
    kinds = [{name: type(module) for name, module in net.named_modules()} for net in networks]
    if any(kind != kinds[0] for kind in kinds):
        return "they are not of one kind"
    if drops(networks[0]):
        return "they drop at random"
    for name, module in _own(networks[0], _others(networks[0])):
        if type(module) not in HOLDERS + LEAVES:
            return f"{name or 'the network'} is a {type(module).__name__}"
    return None


def _others(network: nn.Module) -> list[str]:
    """Names of recalibrations that are not ours: into each goes a map, and out comes one."""
    return [
        f"{name}.recalibrate"
        for name, block in network.named_modules()
        if isinstance(block, BasicBlock) and type(block.recalibrate) not in (MSSAR, nn.Identity)
    ]


def _own(network: nn.Module, others: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules that are neither of these nor in them."""
    within = tuple(f"{name}." for name in others)
    return [found for found in network.named_modules() if not f"{found[0]}.".startswith(within)]


class Stack:
    """``network``, and where each of the networks that it is made of lies in it.

    It takes ``channels`` channels: those of all networks in turn, and empty ones.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        if reason := obstacle(networks):
            raise ValueError(f"these networks cannot be trained as one: {reason}")
        self.count = len(networks)
        self.channels = 0
        self.network = copy.deepcopy(networks[0])
        self._parts: dict[str, list[Part]] = {}  # of a tensor by its name: each network's
        self._owned: dict[str, Tensor] = {}  # which numbers of it are anybody's
        self._single: dict[str, tuple[int, str]] = {}  # by its name: whose it is, and its own name
        others = _others(self.network)
        for name, module in _own(self.network, others):
            if isinstance(module, MSSAR):
                module.channels *= self.count
            elif isinstance(module, LEAVES):
                self._replace(name, [network.get_submodule(name) for network in networks])
        for name in others:
            self._put_beside(name, [network.get_submodule(name) for network in networks])

    def parts(self, of: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One network's parts, by its own names, of tensors like the stack's; views."""
        found = dict[str, Tensor]()
        for name, tensor in tensors.items():
            whose, own = self._single.get(name, (of, name))
            if whose == of:
                found[own] = tensor[self._parts[name][of]] if name in self._parts else tensor
        return found

    def state(self, of: int) -> dict[str, Tensor]:
        """One network's parameters and buffers, as views."""
        return self.parts(of, self.network.state_dict())

    def masks(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Parameters with numbers that are nobody's and stay zero: their gradients' factors."""
        shared = [(self.network.get_parameter(name), owned) for name, owned in self._owned.items()]
        return [(parameter, owned.to(parameter)) for parameter, owned in shared]

    def _replace(self, name: str, modules: list[nn.Module]) -> None:
        """A wide module in the place of a narrow one."""
        made, whole = self._widened(name, modules)
        made.train(modules[0].training)
        for key, target in made.state_dict().items():
            sources = [module.state_dict()[key] for module in modules]
            self._fill(f"{name}.{key}", target, sources, whole and key == "weight")
        self.network.set_submodule(name, made)

    def _put_beside(self, name: str, modules: list[nn.Module]) -> None:
        """Modules as they are in the place of one."""
        self.network.set_submodule(name, Beside(copy.deepcopy(module) for module in modules))
        for which, module in enumerate(modules):
            for key in module.state_dict():
                self._single[f"{name}.{which}.{key}"] = which, f"{name}.{key}"

    def _widened(self, name: str, modules: list[nn.Module]) -> tuple[nn.Module, bool]:
        """Such a module, and whether its weight is one matrix, or else one a network."""
        first, count = modules[0], self.count
        if isinstance(first, nn.BatchNorm2d):
            return nn.BatchNorm2d(first.num_features * count, first.eps, first.momentum), False
        if isinstance(first, nn.Linear):
            outputs = sum(
                module.out_features for module in modules if isinstance(module, nn.Linear)
            )
            return nn.Linear(first.in_features * count, outputs, first.bias is not None), True
        assert isinstance(first, nn.Conv2d)
        holder = self.network.get_submodule(name.rpartition(".")[0])
        inputs, outer = first.in_channels * count, first.in_channels < VECTOR
        product = isinstance(holder, Branch)
        if outer and not product:
            self.channels = inputs = -(-inputs // VECTOR) * VECTOR
        # In groups, strides and few channels are slow: cuDNN takes the groups one by one.
        whole = product or outer or first.stride != (1, 1)
        same: Any = first  # the sizes in it are typed as of any number
        made = nn.Conv2d(
            inputs,
            first.out_channels * count,
            same.kernel_size,
            same.stride,
            same.padding,
            same.dilation,
            1 if whole else count,
            first.bias is not None,
        )
        return made, whole

    def _fill(self, name: str, target: Tensor, sources: list[Tensor], whole: bool) -> None:
        if not target.ndim:  # how many batches a norm has seen: all of them as many
            target.copy_(sources[0])
            return
        parts = list(_spans(sources, 0))
        if whole:
            parts = [
                rows + columns for rows, columns in zip(parts, _spans(sources, 1), strict=True)
            ]
            target.zero_()
            self._owned[name] = torch.zeros(target.shape, dtype=torch.bool)
        for part, source in zip(parts, sources, strict=True):
            target[part].copy_(source)
            if whole:
                self._owned[name][part] = True
        self._parts[name] = parts


def _spans(sources: Sequence[Tensor], axis: int) -> Iterator[Part]:
    """One after the other along an axis."""
    ends = accumulate((source.shape[axis] for source in sources), initial=0)
    return ((slice(*ends),) for ends in pairwise(ends))
