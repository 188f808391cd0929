"""Networks of timm and torchvision with layers in them, as folders that others can load."""

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_experiments import record_of, run_of
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.lab.engine.evaluate import trained
from mssar.lab.recipes import FINETUNE
from mssar.lab.run import Run
from mssar.networks import CifarResNet
from mssar.networks.sharing import CARD, CONFIG, WEIGHTS
from mssar.networks.weights import NOTE
from mssar.surgery import foreign
from mssar.surgery.ends import InPlace
from mssar.surgery.insertion import holders

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra hub")

pytestmark = [
    pytest.mark.usefixtures("torchvision"),
    pytest.mark.skipif(not find_spec("timm"), reason="needs the extra timm"),
]
EXACT = {"rtol": 0, "atol": 0}
NET = "torchvision:mobilenet_v3_small"
ROOM = r" has [\d,]+ numbers, and here are [\d,]+"


def moved(name: str, classes: int = 3, **arguments: Any) -> nn.Module:
    """A network with statistics and weights of its own."""
    net = foreign.bare(name, classes, **arguments)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return net.eval()


def stirred(net: nn.Module) -> nn.Module:
    """As after some training: the layers no longer do nothing."""
    for holder in holders(net).values():
        for name, tensor in holder.recalibrate.named_parameters():
            if "norm2" in name:
                nn.init.normal_(tensor)
    return net


def assert_travels(net: nn.Module, folder: Path, size: int = 64, **how: Any) -> dict[str, Any]:
    before = torch.random.get_rng_state()
    assert mssar.save_pretrained(net, folder, **how) == folder
    assert torch.equal(torch.random.get_rng_state(), before)
    again = mssar.from_pretrained(folder)
    assert not again.training
    channels = how.get("arguments", {}).get("in_chans", 3)
    x = torch.randn(2, channels, size, size)
    with torch.no_grad():
        assert_close(again(x), net.eval()(x), **EXACT)
    assert {f.name for f in folder.iterdir()} == {CONFIG, WEIGHTS, CARD}
    assert [(n, type(h)) for n, h in holders(again).items()] == [
        (n, type(h)) for n, h in holders(net).items()
    ]
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("torchvision:resnet18", "torchvision:regnet_x_400mf", "torchvision:mobilenet_v2"),
        *("torchvision:densenet121", "torchvision:efficientnet_b0", NET),
        *("timm:resnet14t", "timm:regnetx_002", "timm:tinynet_e", "timm:mobilenetv3_small_050"),
        *("timm:convnext_atto", "timm:test_resnet.r160_in1k", "torchvision:resnet50_keras"),
    ],
)
def test_networks_of_others_travel_with_what_was_inserted(tmp_path, name):
    net = moved(name)
    plan = mssar.insert(net)
    config = assert_travels(stirred(net), tmp_path / "net", name=name)
    assert (config["network"], config["recalibration"]) == (name, "mssar")
    assert (config["num_classes"], config["arguments"]) == (3, {"num_classes": 3})
    assert config["options"]["scales"] == [1, 2, 4]
    assert config["options"]["where"] == plan.names
    mssar.remove(mssar.from_pretrained(tmp_path / "net"))  # it knows what was doubled


@pytest.mark.parametrize(
    "how",
    [
        {"scales": (4, 1), "strategy": "sliding", "reduction": 2},
        {"where": ["layer4.*"], "init": "random"},
        {"where": ["*.bn2"]},
        {"where": torch.nn.BatchNorm2d},
        {"where": ["blocks.1.0.bn1", "blocks.1.0.bn3", "blocks.2.*"]},  # of MobileNetV3
        {"where": lambda name, _: name in ("layer1.0", "layer3.1.conv1")},
        {"where": "se"},
        {"backend": "reference"},
    ],
)
def test_whatever_insert_was_told_travels(tmp_path, how):
    se = how.get("where") == "se"
    small = se or "blocks.2.*" in str(how.get("where"))
    name = "timm:mobilenetv3_small_050" if small else "torchvision:resnet18"
    net = moved(name)
    mssar.insert(net, **how)
    config = assert_travels(stirred(net), tmp_path / "net", name=name)
    assert config["options"]["init"] == how.get("init", "identity")
    again = mssar.from_pretrained(tmp_path / "net")
    assert all(isinstance(h, InPlace) for h in holders(again).values()) == se
    layers = [holder.recalibrate for holder in holders(again).values()]
    assert {(m.scales, m.strategy) for m in layers} == {
        (how.get("scales", (1, 2, 4)), how.get("strategy", "regional"))
    }


def test_networks_of_timm_say_their_names_and_others_arguments_are_given(tmp_path):
    net = moved("timm:resnet14t.c3_in1k", in_chans=1, global_pool="max", drop_path_rate=0.2)
    mssar.insert(net)
    given = {"in_chans": 1, "global_pool": "max"}
    config = assert_travels(net, tmp_path / "net", arguments=given)
    assert config["network"] == "timm:resnet14t.c3_in1k"
    for wrong in ({}, {"in_chans": 1}):
        with pytest.raises(ValueError, match="this ResNet is not what timm:resnet14t") as caught:
            mssar.save_pretrained(net, tmp_path / "no", arguments=wrong)
        assert len(str(caught.value).splitlines()) == 1
    net.reset_classifier(0, "max")
    assert_travels(net, tmp_path / "features", arguments=given)
    assert not (tmp_path / "no").exists()


def test_without_layers_and_ours_go_the_same_way(tmp_path):
    config = assert_travels(moved("timm:test_resnet"), tmp_path / "a", name="timm:test_resnet")
    assert (config["recalibration"], config["options"]) == ("none", {})
    ours = mssar.create_model("resnet8", "mssar", 7).eval()
    mssar.save_pretrained(ours, tmp_path / "b")
    assert mssar.from_pretrained(tmp_path / "b").origin == ours.origin
    net = mssar.create_model("resnet8", in_chans=1).eval()
    mssar.insert(net)
    with pytest.raises(ValueError, match=r"after insert take mssar.save_pretrained"):
        net.save_pretrained(tmp_path / "c")
    config = assert_travels(stirred(net), tmp_path / "c", arguments={"in_chans": 1})
    assert config["network"] == "resnet8"
    with pytest.raises(ValueError, match=r"layers inserted: mssar.from_pretrained loads it"):
        CifarResNet.from_pretrained(tmp_path / "c")


def test_a_head_by_hand_a_training_network_and_other_norms_travel(tmp_path):
    net = moved("torchvision:resnet18", 10)
    mssar.insert(net)
    net.fc = nn.Linear(512, 4)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net.relu.inplace = False
    net.train()
    mssar.save_pretrained(net, tmp_path, name="torchvision:resnet18")
    assert net.training
    x = torch.randn(2, 3, 64, 64)
    assert_close(mssar.from_pretrained(tmp_path)(x), net.eval()(x))


def test_what_cannot_be_made_again_is_refused(tmp_path):
    net = moved("torchvision:resnet18")
    mssar.insert(net)
    for how, message in (
        ({}, "name is what this ResNet was made by, as in name='torchvision:resnet18'"),
        ({"name": "torchvision:resnet34"}, "is not what torchvision:resnet34 makes"),
        ({"name": "torchvision:resnet19"}, "has no network 'resnet19'; close to it: resnet1"),
        ({"name": "keras:resnet50"}, "no network 'keras:resnet50': those of other libraries"),
        (
            {"name": "torchvision:resnet18", "arguments": {"weights": "DEFAULT"}},
            "torchvision:resnet18 is shared with num_classes, .*; not 'weights'",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            mssar.save_pretrained(net, tmp_path / "net", **how)
        assert len(str(caught.value).splitlines()) == 1
    net.bn1.eps = 1e-3
    with pytest.raises(ValueError, match=r"bn1 is BatchNorm2d\(64, eps=0.001\), and would be"):
        mssar.save_pretrained(net, tmp_path / "net", name="torchvision:resnet18")
    other = moved("torchvision:resnet18")
    mssar.insert(other, strategy=mssar.Sliding)
    with pytest.raises(ValueError, match="has coordinate sets of your own"):
        mssar.save_pretrained(other, tmp_path / "net", name="torchvision:resnet18")
    assert not (tmp_path / "net").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, torchvision: object) -> Path:  # noqa: ARG001, it may mend it
    net = moved(NET)
    mssar.insert(net)
    return mssar.save_pretrained(net, tmp_path_factory.mktemp("shared") / "net", name=NET)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("network", "torchvision:mobilenet_v9", "torchvision has no network 'mobilenet_v9'"),
        ("network", "keras:resnet50", "no network 'keras:resnet50'"),
        ("network", 3, "a network has a name; got 3"),
        ("network", "timm:local-dir:/etc", "'timm:local-dir:/etc' is no network of timm's own"),
        ("network", "timm:hf-hub:a/b", "'timm:hf-hub:a/b' is no network of timm's own"),
        ("network", "torchvision:resnet18", "torchvision:resnet18 has 11,.* numbers, and here are"),
        ("network", "torchvision:squeezenet1_1", "a ReLU does not say how many channels"),
        ("arguments", [], "arguments is a mapping; got list"),
        ("arguments", {"weights": "DEFAULT"}, "is shared with num_classes, .*; not 'weights'"),
        ("arguments", {"num_classes": 10**9}, "numbers, and here are"),
        ("arguments", {"num_classes": "3"}, "num_classes is a whole number; got '3'"),
        ("arguments", {"dropout": [1]}, r"dropout is a number or a word; got \[1\]"),
        ("arguments", {}, "torchvision:.* has [0-9,]+ numbers, and here are [0-9,]+$"),
        ("arguments", {"num_classes": 2}, "model.safetensors does not fit config.json: .*mismatch"),
        ("options", {"optimizer": None}, "insert is told scales, .*; not 'optimizer'"),
        ("options", {"where": ["nowhere"]}, "was true for none of the"),
        ("options", {"scales": [1]}, "does not fit config.json"),
        ("options", {"scales": [4, 2, 1]}, "trained for regional scales 1, 2, 4"),
        ("options", 3, "describes no network of mssar"),
        ("recalibration", "none", "does not fit config.json"),
    ],
)
def test_a_configuration_that_was_tampered_with_is_one_line(tmp_path, folder, key, value, message):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {key: value}))
    with pytest.raises(ValueError, match=message) as caught:
        mssar.from_pretrained(tmp_path)
    assert len(str(caught.value).splitlines()) == 1
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "arguments", "tensors"),
    [
        ("timm:vit_7b_patch16_dinov3", {}, {"a": torch.zeros(3)}),
        ("timm:test_resnet", {"num_classes": 400_000}, {"a": torch.zeros(0, 400_000)}),
        ("timm:test_resnet", {"in_chans": 10**8}, {"a": torch.zeros(0, 10**8)}),
        ("torchvision:regnet_y_128gf", {"num_classes": 10**7}, {"a": torch.zeros(3)}),
        ("torchvision:vit_h_14", {}, {"a": torch.zeros(10**6, dtype=torch.int8)}),
    ],
)
def test_a_few_bytes_cannot_ask_for_gigabytes(tmp_path, name, arguments, tensors):
    config = {"library": "mssar", "network": name, "recalibration": "none", "options": {}}
    (tmp_path / CONFIG).write_text(json.dumps(config | {"arguments": arguments}))
    safetensors.save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=name + ROOM):
        mssar.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["timm:vit_7b_patch16_dinov3", "torchvision:regnet_y_128gf"])
def test_nor_can_those_of_a_file_s_note(tmp_path, monkeypatch, name):
    monkeypatch.setattr(Run, "build", None)
    run = Run(name, dataset="imagefolder", recipe=FINETUNE).as_dict()
    note = {"run": run, "data": "", "epoch": 1, "record": "", "network": name, "options": {}}
    note |= {"recalibration": "none", "classes": ["a", "b", "c"], "size": [3, 32, 32]}
    note |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    file = tmp_path / "net.safetensors"
    safetensors.save_file({"a": torch.zeros(3)}, file, {NOTE: json.dumps(note)})
    with pytest.raises(ValueError, match=name + ROOM):
        trained(file)


def test_no_file_makes_anybody_ask_the_hub(monkeypatch):
    timm = pytest.importorskip("timm")
    monkeypatch.setattr(timm, "create_model", None)
    for place in ("hf-hub:me/net", "local-dir:/etc"):
        with pytest.raises(ValueError, match=f"{place} says where a network lies"):
            foreign.build(f"timm:{place}")


def test_norms_that_were_named_travel_with_their_own_reduction(tmp_path):
    """Beside known blocks, whose usual one is another."""
    pytest.importorskip("timm")
    net = foreign.bare("timm:efficientnet_b0", 3)
    mssar.insert(net, where="*.bn3")
    found = {layer.reduction for layer in net.modules() if isinstance(layer, mssar.MSSAR)}
    assert len(found) == 2
    mssar.save_pretrained(net, tmp_path / "net")
    again = mssar.from_pretrained(tmp_path / "net")
    x = torch.randn(1, 3, 64, 64)
    assert_close(again(x), net.eval()(x), **EXACT)


@pytest.mark.parametrize("name", ["timm:convnext_atto", "torchvision:convnext_tiny"])
def test_blocks_travel_whose_modules_alone_do_not_say_their_channels(tmp_path, name):
    """With a reduction that is not their usual one."""
    net = moved(name)
    plan = mssar.insert(net, scales=(1, 2), reduction=4)
    config = assert_travels(stirred(net), tmp_path / "net", name=name)
    assert config["options"]["reduction"] == 4
    assert config["options"]["where"] == plan.names


def test_what_is_no_network_or_no_place_is_one_line(tmp_path, unchecked):
    with pytest.raises(ValueError, match="model is a network; got a int"):
        unchecked.save_pretrained(3, tmp_path)
    with pytest.raises(ValueError, match="arguments is a mapping; got list"):
        unchecked.save_pretrained(nn.Identity(), tmp_path, name=NET, arguments=[1])
    with pytest.raises(ValueError, match=r"source is a folder, or owner/name; got a NoneType"):
        unchecked.from_pretrained(None)


@pytest.mark.parametrize("given", [{"name": NET}, {"arguments": {"in_chans": 3}}])
def test_what_our_own_networks_know_is_not_passed_over(tmp_path, given):
    net = mssar.create_model("resnet8", "mssar")
    with pytest.raises(ValueError, match=r"for networks of timm and torchvision; .* 'resnet8'"):
        mssar.save_pretrained(net, tmp_path / "net", **given)
    assert not (tmp_path / "net").exists()
    mssar.save_pretrained(net, tmp_path / "net", name="resnet8")


def test_what_is_no_option_or_no_number_is_one_line(tmp_path):
    net = moved(NET)
    for save in (mssar.save_pretrained, CifarResNet.save_pretrained):
        with pytest.raises(ValueError, match="'reop_id' is an option of push_to_hub=True, if"):
            save(mssar.create_model("resnet8"), tmp_path, reop_id="x")
    net.classifier[-1].bias.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"this network: 'classifier.*bias' has numbers that are"):
        mssar.save_pretrained(net, tmp_path, name=NET)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_spoilt_or_gone_is_one_line(tmp_path, folder):
    (tmp_path / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    with pytest.raises(ValueError, match=r"there is no model.safetensors in"):
        mssar.from_pretrained(tmp_path)
    (tmp_path / WEIGHTS).write_text("nonsense")
    with pytest.raises(ValueError, match=r"model.safetensors does not fit config.json"):
        mssar.from_pretrained(tmp_path)


def test_a_library_that_is_missing_is_one_line(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=r"^torchvision cannot be imported .*: pip install '\."):
        mssar.from_pretrained(folder)


def test_nothing_is_downloaded(folder, monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)
    monkeypatch.setattr(torch, "load", None)
    assert mssar.from_pretrained(folder).classifier[-1].out_features == 3


@pytest.mark.parametrize("kind", ["mssar", "se"])
def test_the_card_and_the_name_are_the_record_s(tmp_path, kind):
    scales = {"scales": (1,)}
    run = run_of(NET, kind, **(scales if kind == "mssar" else {}))
    net = moved(NET)
    mssar.insert(net, **scales)
    mssar.save_pretrained(net, tmp_path / "net", asdict(record_of(run, 7.61)))
    text = (tmp_path / "net" / CARD).read_text("utf-8")
    name = {"mssar": "MS-SAR", "se": "SE"}[kind]
    assert f"# {NET}, {name}, cifar10" in text
    assert "| error, last epoch | 7.61 % |" in text
    assert 'mssar.from_pretrained("net")' in text
    other = asdict(record_of(run_of("timm:resnet50", kind), 7.61))
    with pytest.raises(ValueError, match="the record is of timm:resnet50"):
        mssar.save_pretrained(net, tmp_path / "no", other, NET)
    assert not (tmp_path / "no").exists()


def test_pushing_uploads_the_same_folder(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    seen: dict[str, Any] = {}

    class Api:
        def __init__(self, token):
            seen["token"] = token

        def create_repo(self, name, private, exist_ok):
            assert exist_ok
            assert private is None
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, repo_id, folder_path, commit_message, revision, create_pr):
            seen["net"] = mssar.from_pretrained(folder_path)
            seen["card"] = Path(folder_path, CARD).read_text()
            seen["how"] = commit_message, revision, create_pr
            return f"https://hub.invalid/{repo_id}"

    monkeypatch.setattr(hub, "HfApi", Api)
    net = moved(NET)
    mssar.insert(net)
    address = mssar.push_to_hub(net, "me/net", name=NET, branch="b", commit_message="m")
    assert address == "https://hub.invalid/me/net"
    assert seen["how"] == ("m", "b", False)
    x = torch.randn(1, 3, 64, 64)
    assert_close(seen["net"](x), net(x), **EXACT)
    seen.clear()
    mssar.save_pretrained(net, tmp_path, name=NET, repo_id="me/x", push_to_hub=True, token="t")
    assert seen["token"] == "t"
    assert 'mssar.from_pretrained("me/x")' in seen["card"] == (tmp_path / CARD).read_text()
