"""Networks as folders: what travels, what is refused, and what the card says."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_experiments import record_of, run_of
from torch import nn
from torch.testing import assert_close

import mssar
from mssar.lab.recipes import FINETUNE
from mssar.lab.run import Initial
from mssar.networks import CifarResNet, Classifier, DenseNet, card
from mssar.networks.sharing import CARD, CONFIG, WEIGHTS, config_of

pytest.importorskip("safetensors", reason="needs the extra hub")
EXACT = {"rtol": 0, "atol": 0}


def moved(name, *words, **options):
    """A network with statistics and weights of its own."""
    net = mssar.create_model(name, *words, **options)
    net(torch.randn(4, 3, 16, 16))
    return net.eval()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (("resnet8", "mssar", 7), {"scales": (4, 1), "strategy": "sliding", "reduction": 2}),
        (("resnet8", "se", 0), {}),
        (("resnet8", "simam"), {}),
        (("resnet8",), {}),
    ],
)
def test_configuration_and_weights_travel(tmp_path, words, options):
    net = moved(*words, **options)
    assert net.save_pretrained(tmp_path / "net") == tmp_path / "net"
    again = mssar.from_pretrained(tmp_path / "net")
    assert not again.training
    assert type(again) is type(net)
    assert (again.num_classes, again.origin) == (net.num_classes, net.origin)
    x = torch.randn(2, 3, 20, 17)
    assert_close(again(x), net(x), **EXACT)
    assert {f.name for f in (tmp_path / "net").iterdir()} == {CONFIG, WEIGHTS, CARD}


@pytest.mark.parametrize("folder", [".", "net/..", "../net"])
def test_the_card_has_the_folders_own_name(tmp_path, monkeypatch, folder):
    (tmp_path / "net" / "net").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "net")
    moved("resnet8").save_pretrained(folder)
    assert 'mssar.from_pretrained("net")' in (tmp_path / "net" / CARD).read_text()


def test_every_option_is_written_so_that_defaults_may_change(tmp_path):
    with torch.device("meta"):
        net = mssar.create_model("densenet100", "mssar")
        assert net.origin["options"] == {
            "scales": [1, 2, 4],
            "strategy": "regional",
            "reduction": 1,
            "stage": "multi",
        }
        other = mssar.create_model("densenet100", "mssar", stage="single", backend="reference")
        assert other.origin["options"]["stage"] == "single"
        assert "backend" not in other.origin["options"]
        assert mssar.create_model("resnext50", "se").origin["options"] == {"reduction": 16}
    moved("resnet8", "mssar").save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["library"] == "mssar"
    assert (config["network"], config["num_classes"], config["in_chans"]) == ("resnet8", 10, 3)


def test_other_channels_travel_too(tmp_path):
    net = mssar.create_model("resnet8", "mssar", in_chans=1).eval()
    net.save_pretrained(tmp_path)
    x = torch.randn(2, 1, 16, 16)
    assert_close(mssar.from_pretrained(tmp_path)(x), net(x), **EXACT)


def test_a_fresh_head_and_a_training_network_in_another_layout(tmp_path):
    net = moved("resnet8", "mssar").train().to(memory_format=torch.channels_last)
    net.reset_classifier(3)
    net.save_pretrained(tmp_path)
    assert net.training
    again = CifarResNet.from_pretrained(tmp_path)
    x = torch.randn(2, 3, 16, 16)
    assert_close(again(x), net.eval()(x))
    with pytest.raises(ValueError, match="is a CifarResNet, not a DenseNet"):
        DenseNet.from_pretrained(tmp_path)


def test_the_card_is_filled_from_the_record(tmp_path):
    net, record = moved("resnet20", "mssar"), record_of(run_of(recalibration="mssar"), 7.61)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text(record.as_line())
    for given in (asdict(record), tmp_path / "run", tmp_path / "run" / "record.json"):
        net.save_pretrained(tmp_path / "net", given)
        text = (tmp_path / "net" / CARD).read_text("utf-8")
        assert "# resnet20, MS-SAR, cifar10" in text
        assert "| error, last epoch | 7.61 % |" in text
        assert "value: 92.39" in text
        assert "sha256:0" in text
        assert "| scales | 1, 2, 4 |" in text
        assert 'mssar.from_pretrained("net")' in text
    net.save_pretrained(tmp_path / "net")
    assert "How it was trained is not recorded here." in (tmp_path / "net" / CARD).read_text()
    with pytest.raises(ValueError, match="the record is of resnet20 mssar, and the network is"):
        moved("resnet8").save_pretrained(tmp_path / "other", asdict(record))
    with pytest.raises(ValueError, match="this is no record of a run: KeyError"):
        net.save_pretrained(tmp_path / "other", {"run": {}})
    assert not (tmp_path / "other").exists()


def test_the_card_says_no_paths(tmp_path):
    record = asdict(record_of(run_of(recalibration="mssar"), 7.61))
    record["command"] = "mssar train resnet20 --data-dir /home/somebody/secret/data --runs out"
    moved("resnet20", "mssar").save_pretrained(tmp_path, record)
    text = (tmp_path / CARD).read_text("utf-8")
    assert "`mssar train resnet20 --data-dir data --runs out`" in text
    assert "somebody" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--from timm:local-dir:ld/x/mynet/ --insert", "--from timm:local-dir:mynet --insert"),
        ("--from timm:hf-hub:me/x", "--from timm:hf-hub:me/x"),
        ("--runs=/home/me/runs '/home/some body/x y' /", "--runs=runs 'x y' /"),
        ("--where 'layer1.*'", "--where 'layer1.*'"),
        ("it's /home/me/x", "'it'\"'\"'s' x"),
    ],
)
def test_of_a_command_only_paths_are_shortened(given, said):
    assert card._without_paths(f"mssar train {given}") == f"mssar train {said}"


def test_the_card_of_a_fine_tuned_network_says_what_it_began_with(tmp_path):
    run = replace(
        run_of(recalibration="mssar"), recipe=FINETUNE, weights=Initial("x.pt", "ab" * 32)
    )
    moved("resnet20", "mssar").save_pretrained(tmp_path, asdict(record_of(run, 7.61)))
    text = (tmp_path / CARD).read_text("utf-8")
    assert f"| begun with | x.pt, `sha256:{'ab' * 32}` |\n| recipe | name finetune, epochs" in text
    assert "drops" not in text
    assert (
        "; augmentation photographs: size 224, resize 256, area (0.35, 1), ratio (0.75, 1.33333), "
        "mirror 0.5, rotation 0, jitter 0.2 |\n"
    ) in text


def test_of_five_classes_the_card_has_no_top_5_error(tmp_path):
    record = asdict(record_of(run_of(recalibration="mssar"), 7.61))
    net = moved("resnet20", "mssar")
    for classes in (5, 6):
        record["data"]["classes"] = classes
        net.save_pretrained(tmp_path, record)
        assert ("top-5" in (tmp_path / CARD).read_text("utf-8")) == (classes > 5)
        note = {"size": (3, 8, 8), "mean": [0.5], "std": [0.5], "error": 1.0, "error5": 0.0}
        told = card.card(config_of(net), None, "", note | {"classes": ["a"] * classes})
        assert ("top-5" in told) == (classes > 5)
        assert "measured again with these weights |" in told  # on what, older files do not say


def test_the_cards_head_is_what_the_hub_reads(tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    record = record_of(run_of(recalibration="mssar"), 7.61)
    moved("resnet20", "mssar").save_pretrained(tmp_path, asdict(record))
    head = hub.ModelCard.load(tmp_path / CARD).data
    assert (head.library_name, head.datasets) == ("mssar", ["cifar10"])
    (result,) = head.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 92.39)


def test_pushing_uploads_the_same_folder(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    seen = {}

    class Api:
        def __init__(self, token):
            seen["token"] = token

        def create_repo(self, name, private, exist_ok):
            assert exist_ok
            seen["private"] = private
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, repo_id, folder_path, **_):
            seen["net"] = mssar.from_pretrained(folder_path)
            seen["card"] = Path(folder_path, CARD).read_text()
            return f"https://hub.invalid/{repo_id}"

    monkeypatch.setattr(hub, "HfApi", Api)
    net = moved("resnet8", "mssar")
    address = net.push_to_hub("me/net", private=True, token="secret")
    assert address == "https://hub.invalid/me/net"
    assert (seen["token"], seen["private"]) == ("secret", True)
    x = torch.randn(1, 3, 16, 16)
    assert_close(seen["net"](x), net(x), **EXACT)
    assert 'mssar.from_pretrained("me/net")' in seen["card"]
    assert "secret" not in seen["card"]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_made_again_is_refused(tmp_path):
    with pytest.raises(ValueError, match="only a network that create_model made by names"):
        mssar.create_model("resnet8", nn.Identity).save_pretrained(tmp_path / "net")
    changed = mssar.create_model("resnet8")
    changed.layer3[0].recalibrate = mssar.MSSAR(64)
    with pytest.raises(ValueError, match="this CifarResNet was changed after create_model"):
        changed.save_pretrained(tmp_path / "net")
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (CONFIG, None, "there is no config.json in"),
        (CONFIG, "{", "is no JSON"),
        (CONFIG, "[]", "is no JSON object"),
        (CONFIG, "{}", "describes no network of mssar: KeyError"),
        (CONFIG, ("network", "resnet9"), "no network 'resnet9'"),
        (CONFIG, ("network", "resnet20"), "model.safetensors does not fit config.json"),
        (CONFIG, ("options", {"scales": [1]}), "does not fit config.json"),
        (CONFIG, ("options", {"scales": [4, 2, 1]}), "trained for regional scales 1, 2, 4"),
        (CONFIG, ("options", {"weights": "model.safetensors"}), "describes no network of mssar"),
        (CONFIG, ("num_classes", 10**14), "config.json: .* mismatch for fc.weight"),
        (WEIGHTS, None, "there is no model.safetensors in"),
        (WEIGHTS, "nonsense", "model.safetensors does not fit config.json"),
    ],
)
def test_a_folder_that_is_none_is_one_line(tmp_path, file, content, message):
    moved("resnet8", "mssar").save_pretrained(tmp_path)
    place = tmp_path / file
    if content is None:
        place.unlink()
    elif isinstance(content, tuple):
        place.write_text(json.dumps(json.loads(place.read_text()) | dict([content])))
    else:
        place.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        mssar.from_pretrained(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_not_here_nor_on_the_hub_is_one_line(tmp_path):
    pytest.importorskip("huggingface_hub", reason="needs the extra hub")
    with pytest.raises(ValueError, match="'me/nothing' is no folder here, and no") as caught:
        mssar.from_pretrained("me/nothing", local_files_only=True, cache_dir=tmp_path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("folder", ["/no/such/folder", "./nothing", "~/nothing"])
def test_what_can_only_be_a_folder_is_not_asked_of_the_hub(folder):
    with pytest.raises(ValueError, match=f"^there is no folder {folder}$"):
        mssar.from_pretrained(folder)


def test_without_the_hub_one_line_says_what_to_install():
    program = """
import sys
for name in ("huggingface_hub", "safetensors", "safetensors.torch"):
    sys.modules[name] = None
import mssar
net = mssar.create_model("resnet8")
for act in (
    lambda: net.save_pretrained("x"),
    lambda: net.push_to_hub("me/x"),
    lambda: mssar.from_pretrained("x"),
):
    try:
        act()
    except ValueError as mistake:
        print(mistake)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "save_pretrained needs safetensors: pip install '.[hub]' in a clone of mssar",
        "push_to_hub needs huggingface_hub: pip install '.[hub]' in a clone of mssar",
        "from_pretrained needs safetensors: pip install '.[hub]' in a clone of mssar",
    ], done.stderr


def test_classifiers_need_no_base_class_of_others():
    assert [base.__module__ for base in Classifier.__mro__[1:]] == [
        "torch.nn.modules.module",
        "abc",
        "builtins",
    ]
