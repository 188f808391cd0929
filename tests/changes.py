"""What may be done to a block's modules, and what must still hold then."""

import copy
from functools import partial
from types import MethodType

import torch
from tails import DEVICE, Launched, layer
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

BRANCH = "recalibrate.branches.1"
HOOKS = {
    "register_forward_pre_hook": lambda _, inputs: (inputs[0].square(),),
    "register_forward_hook": lambda _, __, out: out.square(),
    "register_full_backward_pre_hook": lambda _, grads: (2 * grads[0],),
    "register_full_backward_hook": lambda _, grads, __: (2 * grads[0],),
}

automatic = partial(layer, backend="auto")


def replaced(name, make):
    def change(net):
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, make().to(DEVICE))

    return change


def changed(name, attribute, value):
    def change(net):
        setattr(net.get_submodule(name), attribute, value)

    return change


def hooked(name, register="register_forward_hook"):
    def change(net):
        getattr(net.get_submodule(name), register)(HOOKS[register])

    return change


def squared(name):
    """A subclass that gives the square, in its place."""

    def change(net):
        module = net.get_submodule(name)
        kind = type(module)
        own = {"forward": lambda self, x: kind.forward(self, x).square()}
        module.__class__ = type("Squared", (kind,), own)

    return change


def patched(name):
    def change(net):
        module = net.get_submodule(name)
        # A method, so that a copy has one of its own.
        module.forward = MethodType(lambda self, x: type(self).forward(self, x).square(), module)

    return change


def parametrized(name):
    def change(net):
        parametrize.register_parametrization(net.get_submodule(name), "weight", nn.Tanh())

    return change


def wrapped(name):
    def change(net):
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, nn.Sequential(net.get_submodule(name)))

    return change


def assert_by_modules(net, x, ops):
    """The same output, gradient and statistics as on the reference, whichever ops are called."""
    plain, x = copy.deepcopy(net), x.requires_grad_()
    for module in plain.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    with Launched() as names:
        y = net(x)
    assert names == ops
    expected = plain(x)
    assert_close(y, expected, rtol=1e-5, atol=1e-5)
    probe = torch.randn_like(y)
    found, expected = (torch.autograd.grad(made, x, probe)[0] for made in (y, expected))
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, buffer in net.named_buffers():
        assert_close(buffer, plain.get_buffer(name), rtol=1e-4, atol=1e-5, msg=name)
