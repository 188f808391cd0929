"""What every network here has in common: a map, its mean over positions, one linear layer.

The names are timm's, so that code written for its models works on these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from mssar.coordinates import require_tensor
from mssar.tracing import traced

if TYPE_CHECKING:
    from jaxtyping import Float

C = TypeVar("C", bound="Classifier")


class Classifier(nn.Module, ABC):
    """A network that ends in global average pooling and a linear layer ``fc``."""

    num_features: int
    num_classes: int
    fc: nn.Linear | nn.Identity
    note: dict[str, Any] | None = None  # what the file says that its weights came from
    origin: dict[str, Any] | None = None  # what create_model was asked for, if by names

    @abstractmethod
    def forward_features(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N C h w"]:
        """The last map, before the head."""

    def forward_head(
        self, x: Float[Tensor, "N C h w"], pre_logits: bool = False
    ) -> Float[Tensor, "N D"]:
        """Pool the last map and classify it; with ``pre_logits`` only pool it."""
        pooled = x.mean((2, 3))
        logits: Tensor = pooled if pre_logits else self.fc(pooled)
        return logits

    def forward(self, x: Float[Tensor, "N B H W"]) -> Float[Tensor, "N D"]:
        if not traced(x):
            require_tensor("x", x)
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int) -> None:
        """A fresh linear layer for so many classes; 0 leaves the pooled features."""
        self._set_classifier(num_classes, self.num_features)

    def _set_classifier(self, num_classes: int, inputs: int) -> None:
        whole = isinstance(num_classes, int) and not isinstance(num_classes, bool)
        if not whole or num_classes < 0:
            raise ValueError(f"num_classes is 0 (features) or more; got {num_classes!r}")
        self.num_classes = num_classes
        if not num_classes:
            self.fc = nn.Identity()
            return
        like = next(self.parameters())
        self.fc = nn.Linear(inputs, num_classes, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.fc.bias)

    # As on the Hugging Face Hub. What these need is imported when they are called.

    def save_pretrained(
        self,
        folder: Any,
        record: Any = None,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **how: Any,
    ) -> Path:
        """As :func:`mssar.save_pretrained`."""
        from mssar.networks import sharing

        config, found = sharing.config_of(self), sharing.recorded(record)
        return sharing.save(self, Path(folder), config, found, repo_id, push_to_hub, how)

    @classmethod
    def from_pretrained(cls: type[C], source: Any, **how: Any) -> C:
        """As :func:`mssar.from_pretrained`; a network of another class is an error."""
        from mssar.networks import sharing

        made = sharing.from_pretrained(source, **how)
        if not isinstance(made, cls):
            raise ValueError(f"{source} is a {type(made).__name__}, not a {cls.__name__}")
        return made

    def push_to_hub(self, repo_id: str, record: Any = None, **how: Any) -> str:
        """As :func:`mssar.push_to_hub`."""
        from mssar.networks import hub, sharing

        hub.needed("huggingface_hub", "push_to_hub")  # before the work
        config, found = sharing.config_of(self), sharing.recorded(record)
        return sharing.push(repo_id, config, sharing.contents(self), found, **how)


def initialise(module: nn.Module) -> None:
    """He's initialisation by fan-out for convolutions, as in the ResNet and DenseNet authors' code.

    BN starts as the identity by itself; a recalibration initialises itself.
    """
    for name, child in module.named_children():
        if name == "recalibrate":
            continue
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")
        initialise(child)
