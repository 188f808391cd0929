"""How networks are trained: the paper's three recipes, exactly, a short one for the demo, and one
to fine-tune by.

A recipe is a frozen dataclass; a variant is its difference from another, by :func:`varied`. What a
field has in its metadata is for `mssar train`: each is an option there.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from mssar.lab import values


def _require(holds: bool, needed: str, got: Any) -> None:
    if not holds:
        raise ValueError(f"{needed}; got {got!r}")


FILLS = ("black", "mean")
MIRROR = {"help": "Probability of a mirror image."}


@dataclass(frozen=True)
class Crops:
    """Small images: a crop from a padded image, mirrored or not; the whole image in tests."""

    padding: int = field(
        default=4, metadata={"help": "Small images: pixels around, before the crop."}
    )
    mirror: float = field(default=0.5, metadata=MIRROR)
    fill: str = field(
        default="black", metadata={"help": "Small images: the colour around, black or mean."}
    )

    def __post_init__(self) -> None:
        _require(self.padding >= 0, "padding is a number of pixels, 0 or more", self.padding)
        _require(0 <= self.mirror <= 1, "mirror is a probability", self.mirror)
        _require(self.fill in FILLS, f"fill is {' or '.join(FILLS)}", self.fill)


@dataclass(frozen=True)
class Photographs:
    """Photographs: a random part of random shape, mirrored, turned and jittered; in tests the
    shorter side is resized and the centre cut out."""

    size: int = field(default=224, metadata={"help": "Photographs: side of what is cut out."})
    resize: int = field(
        default=256, metadata={"help": "Photographs: shorter side before the test's crop."}
    )
    area: tuple[float, float] = field(
        default=(0.08, 1.0),
        metadata={"help": "Photographs: share cut out, as 0.08,1.", "example": "0.08,1"},
    )
    ratio: tuple[float, float] = field(
        default=(3 / 4, 4 / 3),
        metadata={"help": "Photographs: width over height, as 0.75,1.33.", "example": "0.75,1.33"},
    )
    mirror: float = field(default=0.5, metadata=MIRROR)
    rotation: float = field(default=10.0, metadata={"help": "Photographs: degrees, either way."})
    jitter: float = field(
        default=0.4, metadata={"help": "Photographs: of brightness, contrast, saturation."}
    )

    def __post_init__(self) -> None:
        _require(self.size >= 1, "size is a number of pixels", self.size)
        _require(self.resize >= self.size, f"resize is at least size, {self.size}", self.resize)
        ranged = len(self.area) == 2 and 0 < self.area[0] <= self.area[1] <= 1
        _require(ranged, "area is a range of shares, as in 0.08,1", self.area)
        ranged = len(self.ratio) == 2 and 0 < self.ratio[0] <= self.ratio[1] < math.inf
        _require(ranged, "ratio is a range of width over height, as in 0.75,1.33", self.ratio)
        _require(0 <= self.mirror <= 1, "mirror is a probability", self.mirror)
        _require(0 <= self.rotation <= 180, "rotation is in degrees, 0 to 180", self.rotation)
        _require(0 <= self.jitter <= 1, "jitter is a share, 0 to 1", self.jitter)


Augmentation: TypeAlias = Crops | Photographs
AUGMENTATIONS: dict[str, type[Augmentation]] = {"crops": Crops, "photographs": Photographs}


SCHEDULES = ("steps", "cosine")
DECAYS = ("all", "weights")
INITS = ("he", "torch")
# Fields, of a recipe or its augmentation, that are written down only where they have other values:
# runs from before there were any keep their names.
UNWRITTEN = {
    "schedule": "steps",
    "warmup": 0.0,
    "smoothing": 0.0,
    "ema": 0.0,
    "decay": "all",
    "init": "he",
    "fill": "black",
}


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent with momentum, and the course of its learning rate."""

    name: str
    epochs: int = field(metadata={"help": "Epochs."})
    batch: int = field(metadata={"help": "Images a step, over all processes."})
    lr: float = field(metadata={"help": "Learning rate at first."})
    drops: tuple[int, ...] = field(
        metadata={"help": "After which epochs it drops: 80,120.", "example": "80,120"}
    )
    factor: float = field(default=0.1, metadata={"help": "What a drop multiplies it by."})
    momentum: float = field(default=0.9, metadata={"help": "Of gradient descent."})
    nesterov: bool = field(default=True, metadata={"help": "Nesterov's momentum, or plain."})
    weight_decay: float = field(
        default=1e-4, metadata={"help": "On all parameters, or as --decay says."}
    )
    augmentation: Augmentation = Crops()
    # What the paper does not have.
    schedule: str = field(
        default="steps", metadata={"help": "Of the learning rate: steps or cosine."}
    )
    warmup: float = field(default=0.0, metadata={"help": "Epochs in which it rises."})
    smoothing: float = field(
        default=0.0, metadata={"help": "Of labels: the share of all classes alike."}
    )
    ema: float = field(  # 0: there is no average
        default=0.0, metadata={"help": "Test the weights' average; what a step leaves of it."}
    )
    # What the paper does not say.
    decay: str = field(
        default="all",
        metadata={"help": "Of weight decay: all, or weights (no norms, no biases)."},
    )
    init: str = field(
        default="he", metadata={"help": "Of our networks from scratch: he, or torch's own."}
    )

    def __post_init__(self) -> None:
        _require(self.epochs >= 1, "epochs is 1 or more", self.epochs)
        _require(self.batch >= 2, "batch is 2 or more, for BN", self.batch)
        _require(0 < self.lr < math.inf, "lr is above 0", self.lr)
        ascending = all(a < b for a, b in zip((0, *self.drops), self.drops, strict=False))
        _require(ascending, "drops are epochs in ascending order, as in 80,120", self.drops)
        _require(0 < self.factor <= 1, "factor is between 0 and 1", self.factor)
        _require(0 <= self.momentum < 1, "momentum is between 0 and 1", self.momentum)
        _require(0 <= self.weight_decay < math.inf, "weight_decay is 0 or more", self.weight_decay)
        if self.nesterov and not self.momentum:
            raise ValueError("Nesterov's momentum needs momentum above 0, or to be switched off")
        _require(self.schedule in SCHEDULES, f"schedule is {' or '.join(SCHEDULES)}", self.schedule)
        if self.schedule == "cosine" and self.drops:
            raise ValueError(f"a cosine falls all the time: drops={self.drops} are for steps")
        within = f"warmup is in epochs, 0 or more and less than all {self.epochs}"
        _require(0 <= self.warmup < self.epochs, within, self.warmup)
        _require(
            0 <= self.smoothing < 1, "smoothing is a share, 0 or more, below 1", self.smoothing
        )
        _require(0 <= self.ema < 1, "ema is 0 (off) or a share below 1, as in 0.999", self.ema)
        _require(self.decay in DECAYS, f"decay is {' or '.join(DECAYS)}", self.decay)
        _require(self.init in INITS, f"init is {' or '.join(INITS)}", self.init)

    def lr_at(self, epoch: float) -> float:
        """The learning rate when so many epochs have passed, and a part of the next."""
        if epoch < self.warmup:
            return self.lr * epoch / self.warmup
        if self.schedule == "cosine":
            passed = (epoch - self.warmup) / (self.epochs - self.warmup)
            return self.lr * (1 + math.cos(math.pi * passed)) / 2
        return self.lr * self.factor ** sum(drop <= epoch for drop in self.drops)

    def lr_of(self, epoch: int, step: int, steps: int) -> float:
        """That of a step, all counted from 0: in its middle, so that none is without effect."""
        return self.lr_at(epoch + (step + 0.5) / steps)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON; :func:`recipe_from_dict` reads it back."""
        kind = next(k for k, v in AUGMENTATIONS.items() if isinstance(self.augmentation, v))
        found = _written(asdict(self))
        found["augmentation"] = {"kind": kind, **_written(found["augmentation"])}
        listed: dict[str, Any] = _lists(found)
        return listed


CIFAR_RESNET = Recipe("cifar_resnet", epochs=160, batch=128, lr=0.1, drops=(80, 120))
CIFAR_DENSENET = Recipe("cifar_densenet", epochs=300, batch=64, lr=0.1, drops=(150, 225))
ILSVRC2012 = Recipe(
    "ilsvrc2012", epochs=100, batch=1024, lr=0.6, drops=(30, 60, 90), augmentation=Photographs()
)
# Short enough for a CPU; where things are decides the class, so nothing is mirrored. At half the
# rate SE is still on a plateau when the rate drops, and rounding decides how it ends.
DEMO = Recipe(
    "demo", epochs=8, batch=64, lr=0.2, drops=(5, 7), augmentation=Crops(padding=2, mirror=0.0)
)
# For weights that know photographs already: gentle steps, and most of a photograph in every cut.
FINETUNE = Recipe(
    "finetune",
    epochs=20,
    batch=32,
    lr=0.01,
    drops=(),
    augmentation=Photographs(area=(0.35, 1.0), rotation=0.0, jitter=0.2),
    schedule="cosine",
    warmup=1.0,
    smoothing=0.1,
)

RECIPES = {
    recipe.name: recipe for recipe in (CIFAR_RESNET, CIFAR_DENSENET, ILSVRC2012, DEMO, FINETUNE)
}


def varied(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with some of its fields, or its augmentation's, replaced.

    Where steps become a cosine their drops go.
    """
    own = {f.name for f in fields(Recipe)}
    augmentation: Augmentation = changes.get("augmentation", recipe.augmentation)
    inner = {f.name for f in fields(augmentation)}
    for name in changes:
        if name not in own | inner:
            known = sorted((own | inner) - {"name", "augmentation"})
            raise ValueError(f"{recipe.name} has no {name!r}; it has {', '.join(known)}")
    within = {k: v for k, v in changes.items() if k in inner}
    outer = {k: v for k, v in changes.items() if k in own}
    if outer.get("schedule") == "cosine":
        outer.setdefault("drops", ())
    if within:
        outer["augmentation"] = replace(augmentation, **within)
    return replace(recipe, **outer)


def recipe_from_dict(found: Any) -> Recipe:
    """What :meth:`Recipe.as_dict` wrote."""
    try:
        rest = values.converted(found, dict[str, Any], "")
        inner = values.converted(rest.get("augmentation"), dict[str, Any], "augmentation")
        kind = values.converted(inner.pop("kind", None), str, "augmentation.kind")
        if kind not in AUGMENTATIONS:
            known = " or ".join(AUGMENTATIONS)
            raise ValueError(f"augmentation.kind: expected {known}; got {kind!r:.60}")
        augmentation = values.fitted(AUGMENTATIONS[kind], inner, "augmentation.")
        return values.fitted(Recipe, rest, augmentation=augmentation)
    except ValueError as error:
        raise ValueError(f"this is no recipe: {error}") from None


def _written(found: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in found.items() if k not in UNWRITTEN or v != UNWRITTEN[k]}


def _lists(value: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value
