"""The paper's recipes, and what is told apart as a run."""

import json
import re
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise

import pytest
import torch

import mssar
from mssar.lab.recipes import (
    CIFAR_DENSENET,
    CIFAR_RESNET,
    DEMO,
    FINETUNE,
    ILSVRC2012,
    RECIPES,
    Crops,
    Photographs,
    Recipe,
    recipe_from_dict,
    varied,
)
from mssar.lab.run import Run, run_from_dict, usual_recipe

# As printed: epochs, images a batch, first learning rate, and the epochs after which it drops.
PRINTED = {
    "cifar_resnet": (160, 128, 0.1, (80, 120)),
    "cifar_densenet": (300, 64, 0.1, (150, 225)),
    "ilsvrc2012": (100, 1024, 0.6, (30, 60, 90)),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_is_the_papers(name):
    recipe = RECIPES[name]
    assert (recipe.epochs, recipe.batch, recipe.lr, recipe.drops) == PRINTED[name]
    assert (recipe.momentum, recipe.nesterov, recipe.weight_decay) == (0.9, True, 1e-4)
    assert recipe.factor == 0.1


def test_the_papers_augmentations():
    assert CIFAR_RESNET.augmentation == CIFAR_DENSENET.augmentation == Crops(4, 0.5)
    photographs = ILSVRC2012.augmentation
    assert (photographs.size, photographs.resize) == (224, 256)
    assert (photographs.area, photographs.ratio) == ((0.08, 1.0), (0.75, 4 / 3))
    assert (photographs.mirror, photographs.rotation, photographs.jitter) == (0.5, 10, 0.4)


def test_the_demo_mirrors_nothing_and_every_recipe_is_listed_by_its_name():
    assert DEMO.augmentation.mirror == 0
    assert list(RECIPES.values()) == [CIFAR_RESNET, CIFAR_DENSENET, ILSVRC2012, DEMO, FINETUNE]
    assert [recipe.name for recipe in RECIPES.values()] == list(RECIPES)


@pytest.mark.parametrize(
    ("recipe", "course"),
    [
        (CIFAR_RESNET, {0: 0.1, 79: 0.1, 80: 0.01, 119: 0.01, 120: 0.001, 159: 0.001}),
        (CIFAR_DENSENET, {0: 0.1, 149: 0.1, 150: 0.01, 224: 0.01, 225: 0.001, 299: 0.001}),
        (
            ILSVRC2012,
            {0: 0.6, 29: 0.6, 30: 0.06, 59: 0.06, 60: 0.006, 89: 0.006, 90: 6e-4, 99: 6e-4},
        ),
        (varied(CIFAR_RESNET, drops=()), {0: 0.1, 159: 0.1}),
        (varied(CIFAR_RESNET, factor=0.5), {79: 0.1, 80: 0.05, 120: 0.025}),
        (varied(CIFAR_RESNET, warmup=2.0), {0: 0, 0.5: 0.025, 1: 0.05, 2: 0.1, 80.5: 0.01}),
        (varied(CIFAR_RESNET, schedule="cosine"), {0: 0.1, 40: 0.0853553390593, 80: 0.05, 160: 0}),
        (FINETUNE, {0: 0, 0.25: 0.0025, 1: 0.01, 10.5: 0.005, 20: 0}),
    ],
)
def test_the_learning_rate_drops_after_so_many_epochs(recipe, course):
    for epoch, lr in course.items():
        assert recipe.lr_at(epoch) == pytest.approx(lr, rel=1e-12, abs=1e-15)


def test_every_step_has_a_learning_rate_of_its_own_between_two_of_the_course():
    rates = [FINETUNE.lr_of(epoch, step, 4) for epoch in (0, 1, 19) for step in range(4)]
    assert rates[:4] == pytest.approx([0.00125, 0.00375, 0.00625, 0.00875])
    assert all(a > b > 0 for a, b in pairwise(rates[4:]))
    assert CIFAR_RESNET.lr_of(79, 3, 4) == CIFAR_RESNET.lr  # what it always was, to the bit
    assert CIFAR_RESNET.lr_of(80, 0, 4) == CIFAR_RESNET.lr_at(80)


def test_what_the_paper_does_not_have_is_written_down_only_where_it_is_used():
    new = {"schedule", "warmup", "smoothing", "ema", "decay", "init"}
    assert not new & CIFAR_RESNET.as_dict().keys()
    assert new & FINETUNE.as_dict().keys() == {"schedule", "warmup", "smoothing"}
    assert CIFAR_RESNET.as_dict()["augmentation"] == {"kind": "crops", "padding": 4, "mirror": 0.5}
    other = varied(CIFAR_RESNET, decay="weights", init="torch", fill="mean")
    assert other.as_dict() == {
        **CIFAR_RESNET.as_dict(),
        "augmentation": {"kind": "crops", "padding": 4, "mirror": 0.5, "fill": "mean"},
        "decay": "weights",
        "init": "torch",
    }
    assert recipe_from_dict(json.loads(json.dumps(other.as_dict()))) == other
    assert Run("resnet20").name == "arrangements-resnet20-none-seed0-ebc6e9"
    assert varied(CIFAR_RESNET, schedule="cosine").drops == ()


def test_a_variant_is_its_difference():
    shorter = varied(CIFAR_RESNET, epochs=10, drops=(5,), mirror=0.25)
    assert shorter == replace(
        CIFAR_RESNET, epochs=10, drops=(5,), augmentation=Crops(padding=4, mirror=0.25)
    )
    assert varied(CIFAR_RESNET) == CIFAR_RESNET
    assert varied(ILSVRC2012, size=160).augmentation == Photographs(size=160)
    assert CIFAR_RESNET.augmentation.mirror == 0.5  # the original is as it was
    with pytest.raises(FrozenInstanceError):
        CIFAR_RESNET.lr = 1.0


def test_another_augmentation_and_its_own_fields_can_be_given_together():
    moved = varied(ILSVRC2012, augmentation=Crops(), padding=0)
    assert moved == replace(ILSVRC2012, augmentation=Crops(padding=0))
    with pytest.raises(ValueError, match="ilsvrc2012 has no 'size'"):
        varied(ILSVRC2012, augmentation=Crops(), size=160)


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        (
            CIFAR_RESNET,
            {"epoch": 3},
            "cifar_resnet has no 'epoch'; it has batch, decay, drops, ema, ",
        ),
        (CIFAR_RESNET, {"size": 64}, "cifar_resnet has no 'size'; "),
        (ILSVRC2012, {"padding": 4}, "ilsvrc2012 has no 'padding'; .* rotation, schedule, size, "),
        (CIFAR_RESNET, {"epochs": 0}, "epochs is 1 or more; got 0"),
        (CIFAR_RESNET, {"batch": 1}, "batch is 2 or more, for BN; got 1"),
        (CIFAR_RESNET, {"lr": 0.0}, "lr is above 0; got 0.0"),
        (CIFAR_RESNET, {"lr": -0.1}, "lr is above 0; got -0.1"),
        (CIFAR_RESNET, {"lr": float("nan")}, "lr is above 0; got nan"),
        (CIFAR_RESNET, {"lr": float("inf")}, "lr is above 0; got inf"),
        (CIFAR_RESNET, {"drops": (120, 80)}, r"ascending order, .*; got \(120, 80\)"),
        (CIFAR_RESNET, {"drops": (80, 80)}, r"ascending order, .*; got \(80, 80\)"),
        (CIFAR_RESNET, {"drops": (0, 80)}, r"ascending order, .*; got \(0, 80\)"),
        (CIFAR_RESNET, {"factor": 0.0}, "factor is between 0 and 1; got 0.0"),
        (CIFAR_RESNET, {"factor": 2.0}, "factor is between 0 and 1; got 2.0"),
        (CIFAR_RESNET, {"momentum": 1.0}, "momentum is between 0 and 1; got 1.0"),
        (CIFAR_RESNET, {"momentum": -0.1}, "momentum is between 0 and 1; got -0.1"),
        (CIFAR_RESNET, {"momentum": 0.0}, "needs momentum above 0, or to be switched off"),
        (CIFAR_RESNET, {"weight_decay": -1e-4}, "weight_decay is 0 or more; got -0.0001"),
        (CIFAR_RESNET, {"weight_decay": float("inf")}, "weight_decay is 0 or more; got inf"),
        (CIFAR_RESNET, {"schedule": "linear"}, "schedule is steps or cosine; got 'linear'"),
        (
            CIFAR_RESNET,
            {"schedule": "cosine", "drops": (3,)},
            r"all the time: drops=\(3,\) are for",
        ),
        (CIFAR_RESNET, {"warmup": -1.0}, "warmup is in epochs, 0 or more and .* 160; got -1.0"),
        (FINETUNE, {"epochs": 1}, "warmup is in epochs, .* less than all 1; got 1.0"),
        (CIFAR_RESNET, {"smoothing": 1.0}, "smoothing is a share, 0 or more, below 1; got 1.0"),
        (CIFAR_RESNET, {"ema": 1.0}, r"ema is 0 \(off\) or a share below 1, .*; got 1.0"),
        (CIFAR_RESNET, {"decay": "norms"}, "decay is all or weights; got 'norms'"),
        (CIFAR_RESNET, {"init": "xavier"}, "init is he or torch; got 'xavier'"),
        (CIFAR_RESNET, {"fill": "white"}, "fill is black or mean; got 'white'"),
        (ILSVRC2012, {"fill": "mean"}, "ilsvrc2012 has no 'fill'; it has area, batch, decay, "),
        (CIFAR_RESNET, {"padding": -1}, "padding is a number of pixels, 0 or more; got -1"),
        (CIFAR_RESNET, {"mirror": 1.5}, "mirror is a probability; got 1.5"),
        (CIFAR_RESNET, {"mirror": float("nan")}, "mirror is a probability; got nan"),
        (ILSVRC2012, {"size": 0}, "size is a number of pixels; got 0"),
        (ILSVRC2012, {"size": 300}, "resize is at least size, 300; got 256"),
        (ILSVRC2012, {"area": (0.0, 1.0)}, r"area is a range of shares, .*; got \(0.0, 1.0\)"),
        (ILSVRC2012, {"area": (0.5, 0.2)}, r"area is a range of shares, .*; got \(0.5, 0.2\)"),
        (ILSVRC2012, {"area": (0.1, 0.2, 0.3)}, r"area is a range.*; got \(0.1, 0.2, 0.3\)"),
        (ILSVRC2012, {"ratio": (2.0, 1.0)}, r"ratio is a range.*; got \(2.0, 1.0\)"),
        (ILSVRC2012, {"ratio": (1.0, float("inf"))}, r"ratio is a range.*; got \(1.0, inf\)"),
        (ILSVRC2012, {"ratio": (1.0,)}, r"ratio is a range.*; got \(1.0,\)"),
        (ILSVRC2012, {"rotation": 181.0}, "rotation is in degrees, 0 to 180; got 181.0"),
        (ILSVRC2012, {"jitter": -0.1}, "jitter is a share, 0 to 1; got -0.1"),
    ],
)
def test_a_bad_value_is_told_with_what_would_do(recipe, change, message):
    with pytest.raises(ValueError, match=message):
        varied(recipe, **change)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json(name):
    recipe = varied(RECIPES[name], nesterov=False, momentum=0.0)
    assert recipe_from_dict(json.loads(json.dumps(recipe.as_dict()))) == recipe
    assert RECIPES[name].as_dict() == json.loads(json.dumps(RECIPES[name].as_dict()))


def test_a_whole_number_from_json_becomes_the_fraction_it_stands_for():
    found = CIFAR_RESNET.as_dict() | {"lr": 1}
    assert isinstance(recipe_from_dict(found).lr, float)


def _changed(**changes: object) -> dict[str, object]:
    return CIFAR_RESNET.as_dict() | changes


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"name": "x", "augmentation": {"kind": "crops"}},
        _changed(epochs="160"),
        _changed(epochs=160.0),
        _changed(epochs=True),
        _changed(lr="0.1"),
        _changed(lr=None),
        _changed(lr=True),
        _changed(nesterov=1),
        _changed(name=3),
        _changed(drops=80),
        _changed(drops="80"),
        _changed(drops=["80"]),
        _changed(drops=[80.5]),
        _changed(burn_in=5),
        _changed(warmup="5"),
        _changed(schedule=3),
        _changed(augmentation={"padding": 4}),
        _changed(augmentation={"kind": "mixup"}),
        _changed(augmentation={"kind": ["crops"]}),
        _changed(augmentation={"kind": "crops", "size": 4}),
        _changed(augmentation={"kind": "crops", "padding": 4.0}),
        _changed(augmentation=None),
        None,
        [],
    ],
)
def test_what_is_no_recipe_is_refused(found):
    with pytest.raises(ValueError, match="this is no recipe: "):
        recipe_from_dict(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epochs": "160"}, "epochs: expected int; got '160'"),
        ({"drops": [80, "120"]}, "drops[1]: expected int; got '120'"),
        ({"burn_in": 5}, "burn_in: unknown"),
        ({"decay": True}, "decay: expected str; got True"),
        ({"decay": "none"}, "decay is all or weights; got 'none'"),
        ({"init": ["he"]}, "init: expected str; got ['he']"),
        ({"init": "He"}, "init is he or torch; got 'He'"),
        (
            {"augmentation": {"kind": "crops", "fill": 0}},
            "augmentation.fill: expected str; got 0",
        ),
        (
            {"augmentation": {"kind": "crops", "fill": "grey"}},
            "fill is black or mean; got 'grey'",
        ),
        (
            {"augmentation": {"kind": "photographs", "fill": "mean"}},
            "augmentation.fill: unknown",
        ),
        (
            {"augmentation": {"kind": "mixup"}},
            "augmentation.kind: expected crops or photographs; got 'mixup'",
        ),
        (
            {"augmentation": {"kind": "crops", "padding": 4.5}},
            "augmentation.padding: expected int; got 4.5",
        ),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(change, said):
    with pytest.raises(ValueError, match=re.escape(f"this is no recipe: {said}")):
        recipe_from_dict(_changed(**change))


def test_values_out_of_range_are_refused_from_json_too():
    with pytest.raises(ValueError, match="lr is above 0; got inf"):
        recipe_from_dict(json.loads(json.dumps(_changed()).replace('"lr": 0.1', '"lr": 1e999')))


def test_options_are_settled():
    assert dict(Run("resnet20").options) == {}
    assert dict(Run("resnet20", "se").options) == {"reduction": 1}
    usual = {"scales": (1, 2, 4), "strategy": "regional", "reduction": 1}
    assert dict(Run("resnet20", "mssar").options) == usual
    assert dict(Run("resnet20", "mssar", {"scales": [2]}).options) == usual | {"scales": (2,)}
    assert dict(Run("densenet100", "mssar").options) == usual | {"stage": "multi"}
    assert dict(Run("resnext50", "mssar").options) == usual | {"reduction": 16}
    with pytest.raises(TypeError):
        Run("resnet20", "mssar").options["reduction"] = 2


def test_two_ways_of_saying_the_same_are_one_run():
    said = Run("resnet20", "mssar", {"reduction": 1, "scales": [1, 2, 4]})
    assert said == Run("resnet20", "mssar")
    assert said.name == Run("resnet20", "mssar").name
    assert hash(said) == hash(Run("resnet20", "mssar"))
    assert said != Run("resnet20", "mssar", {"reduction": 2})


def test_every_difference_makes_another_name():
    first = Run("resnet20", "mssar")
    others = [
        replace(first, network="resnet32"),
        Run("resnet20", "se"),
        Run("resnet20"),
        replace(first, options={"scales": (1, 24)}),
        replace(first, options={"scales": (12, 4)}),
        replace(first, options={"reduction": 2}),
        replace(first, options={"strategy": "sliding"}),
        replace(first, dataset="cifar10"),
        replace(first, seed=1),
        replace(first, recipe=CIFAR_DENSENET),
        replace(first, recipe=varied(CIFAR_RESNET, lr=0.05)),
        replace(first, recipe=varied(CIFAR_RESNET, mirror=0.0)),
        replace(first, recipe=varied(CIFAR_RESNET, decay="weights")),
        replace(first, recipe=varied(CIFAR_RESNET, init="torch")),
        replace(first, recipe=varied(CIFAR_RESNET, fill="mean")),
    ]
    names = [run.name for run in (first, *others)]
    assert len(set(names)) == len(names)
    for name in names:
        assert re.fullmatch(r"[a-z0-9.-]+", name)
    assert first.name.startswith("arrangements-resnet20-mssar-seed0-")


def test_a_label_names_only_what_is_unusual():
    assert Run("resnet20").label == "resnet20 none"
    assert Run("resnet20", "mssar", {"scales": (1, 2, 4)}).label == "resnet20 mssar"
    assert Run("resnext50", "mssar", {"reduction": 16}).label == "resnext50 mssar"
    unusual = Run("densenet100", "mssar", {"scales": [1, 2], "stage": "single"})
    assert unusual.label == "densenet100 mssar scales=1,2 stage=single"
    assert unusual.name.startswith("arrangements-densenet100-mssar-scales1.2-stagesingle-seed0-")


@pytest.mark.parametrize(
    "run",
    [
        Run("resnet20"),
        Run("densenet100", "mssar", {"scales": (1, 2), "stage": "single"}, "cifar100", seed=7),
        Run("resnext50", "se", {"reduction": 4}, "ilsvrc2012", ILSVRC2012),
    ],
)
def test_a_run_survives_json(run):
    again = run_from_dict(json.loads(json.dumps(run.as_dict())))
    assert again == run
    assert again.name == run.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("resnet21",), "no network 'resnet21'; there are resnet"),
        (
            ("resnet20", "cbma"),
            "one of none, se, mssar, eca, cbam, coord, ela, ge, simam; got 'cbma'",
        ),
        (("resnet20", "none", {"scales": (1,)}), "has no option 'scales'; .*: there are none"),
        (("resnet20", "se", {"scales": (1,)}), "has no option 'scales'; its options: reduction"),
        (("resnet20", "mssar", {"stage": "multi"}), "has no option 'stage'; "),
        (("densenet100", "none", {"stage": "multi"}), "has no option 'stage'; "),
        *(
            (("resnet20", "none", {}, name), "a data set's name begins with a letter .*; got ")
            for name in ("", "../evil", "/evil", ".evil", "-evil", "a b", "a\n", "é", "a" * 101, 3)
        ),
        (("resnet20", "none", {}, "cifar10", CIFAR_RESNET, -1), "0 to 2147483647; got -1"),
        (("resnet20", "none", {}, "cifar10", CIFAR_RESNET, 2**31), "; got 2147483648"),
    ],
)
def test_a_bad_run_is_one_clear_error(words, message):
    with pytest.raises(ValueError, match=message):
        Run(*words)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"network": None}, "network: expected str; got None"),
        ({"options": []}, r"options: expected object; got \[\]"),
        ({"recipe": {}}, "this is no recipe: augmentation: expected object; got None"),
        ({"dataset": 3}, "dataset: expected str; got 3"),
        ({"seed": "0"}, "seed: expected int; got '0'"),
        ({"seed": 1.5}, "seed: expected int; got 1.5"),
        ({"seed": True}, "seed: expected int; got True"),
        ({"seed": -1}, "a seed is a whole number from 0"),
        ({"colour": "red"}, "colour: unknown"),
    ],
)
def test_what_describes_no_run_is_refused(change, said):
    with pytest.raises(ValueError, match=said):
        run_from_dict(Run("resnet20").as_dict() | change)
    found = Run("resnet20").as_dict()
    del found["recipe"]
    for none, said in ((found, "recipe"), (None, "a run: expected object"), (["seed"], "a run")):
        with pytest.raises(ValueError, match=said):
            run_from_dict(none)


def test_a_mistake_inside_an_option_is_found_before_training():
    Run("resnet20", "mssar").check()
    with pytest.raises(ValueError, match=r"got \(1, 1\)"):
        Run("resnet20", "mssar", {"scales": (1, 1)}).check()


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(5)
    first = Run("resnet20", "mssar", seed=3).build(4).state_dict()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))  # the global generator was left alone
    torch.manual_seed(3)
    expected = mssar.create_model("resnet20", "mssar", num_classes=4).state_dict()
    other = Run("resnet20", "mssar", seed=4).build(4).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(first[name], tensor)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_the_usual_recipe_is_the_papers_for_that_network_and_data():
    assert usual_recipe("resnet20", "cifar10") is CIFAR_RESNET
    assert usual_recipe("densenet100", "cifar100") is CIFAR_DENSENET
    assert usual_recipe("resnet18", "ilsvrc2012") is ILSVRC2012
    assert usual_recipe("resnet18", "imagefolder") is ILSVRC2012
    assert usual_recipe("densenet100", "arrangements") is DEMO
    assert usual_recipe("resnet18", "imagefolder", begun=True) is FINETUNE
    assert usual_recipe("timm:resnet50", "imagefolder") is FINETUNE
    assert usual_recipe("timm:resnet50", "cifar10") is CIFAR_RESNET


def test_json_says_which_augmentation_it_is():
    assert Recipe("x", 1, 2, 0.1, ()).as_dict()["augmentation"]["kind"] == "crops"
    assert ILSVRC2012.as_dict()["augmentation"]["kind"] == "photographs"
