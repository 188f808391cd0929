"""Other recalibrations by name: what they compute, and what they need."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.lab.run import Run, run_from_dict
from mssar.networks.peers import SimAM

TIMMS = ("eca", "cbam", "coord", "ela", "ge")


@pytest.mark.parametrize("size", [(5, 7), (1, 1)])
def test_simam_is_the_energy_of_its_paper(size):
    """The less of it a neuron has, the more it weighs: 4 (σ² + λ) / ((x − μ)² + 2σ² + 2λ)."""
    x = torch.randn(2, 3, *size).double()
    if size == (1, 1):  # nothing to be apart from
        assert_close(SimAM(3)(x), x * torch.tensor(0.5).double().sigmoid())
        return
    variance, mean = torch.var_mean(x, (2, 3), keepdim=True)
    energy = 4 * (variance + 1e-4) / ((x - mean) ** 2 + 2 * variance + 2e-4)
    assert_close(SimAM(3)(x), x * (1 / energy).sigmoid())


def test_timms_modules_are_timms(timm):
    from timm.layers import cbam, coord_attn, eca

    net = {kind: mssar.create_model("resnet8", kind) for kind in TIMMS}
    last = {kind: made.layer3[0].recalibrate for kind, made in net.items()}
    assert type(last["eca"]) is eca.EcaModule
    assert type(last["cbam"]) is cbam.CbamModule
    assert type(last["coord"]) is coord_attn.CoordAttn
    assert type(last["ela"]) is coord_attn.EfficientLocalAttn
    x = torch.randn(2, 64, 5, 6)
    assert_close(last["ge"](x), x * x.mean((2, 3), keepdim=True).sigmoid())
    assert last["cbam"].channel.fc1.out_channels == 4
    wide = mssar.create_model("resnet8", "cbam", reduction=2).layer3[0].recalibrate
    assert wide.channel.fc1.out_channels == 32
    assert timm


@pytest.mark.parametrize("kind", [*TIMMS, "simam"])
def test_networks_learn_with_them_and_are_counted(timm, kind):
    assert timm
    net = mssar.create_model("resnet8", kind)
    net(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    plain = mssar.cost(mssar.create_model("resnet8"), (3, 32, 32))
    found = mssar.cost(net, (3, 32, 32))
    assert found.params - plain.params == found.recalibration_params
    assert (found.recalibration_params == 0) == (kind in ("ge", "simam"))


def test_a_densenet_takes_them_single_stage_alone():
    net = mssar.create_model("densenet100", "simam")
    assert net.block1.stage == "single"
    with pytest.raises(ValueError, match="densenet100 with 'simam' has no option 'stage'"):
        mssar.create_model("densenet100", "simam", stage="single")
    assert Run("densenet100", "simam").options == {}


def test_runs_with_them_settle_their_options_and_are_read_back(timm):
    assert timm
    run = Run("resnet20", "cbam")
    assert dict(run.options) == {"reduction": 16}
    assert run.label == "resnet20 cbam"
    assert Run("resnet20", "coord", {"reduction": 1}).label == "resnet20 coord reduction=1"
    assert run_from_dict(run.as_dict()) == run
    run.check()
    with pytest.raises(ValueError, match="has no option 'backend'"):
        mssar.create_model("resnet20", "cbam", backend="reference")
    with pytest.raises(ValueError, match="reduction"):
        mssar.create_model("resnet20", "cbam", reduction=0)


def test_without_timm_one_line_says_what_to_install():
    program = """
import sys
sys.modules["timm"] = None  # an import of it fails
import mssar
mssar.create_model("resnet8", "simam")
try:
    mssar.create_model("resnet8", "eca")
except ValueError as mistake:
    print(mistake)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert line.startswith("'eca' is timm's, which cannot be imported (")
    assert line.endswith("): pip install '.[timm]' in a clone of mssar")


def test_a_timm_that_is_too_old_is_named(timm, monkeypatch):
    from timm.layers import coord_attn

    monkeypatch.delattr(coord_attn, "CoordAttn")
    message = f"timm {timm.__version__} has no CoordAttn for 'coord': pip install -U timm"
    with pytest.raises(ValueError, match=message):
        mssar.create_model("resnet8", "coord")


def test_a_factory_of_ones_own_stays_one():
    assert isinstance(mssar.create_model("resnet8", nn.Identity).layer1[0].recalibrate, nn.Identity)
