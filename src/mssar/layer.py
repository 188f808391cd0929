"""MS-SAR: multi-scale spatially-asymmetric recalibration.  N batch, C channels, H W map, h w cells.

Z = 1/L · Σ over scales l of  spread_l( sigmoid( BN( Ω₂ · relu( BN( Ω₁ · pool_l(x) ) ) ) ) )
y = x ⊙ Z
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from mssar import fused
from mssar.branch import Branch, settled
from mssar.coordinates import require_count, require_map, require_tensor, size_of
from mssar.kernels import chosen, exporting, require_backend
from mssar.kernels.tail.op import watched
from mssar.kernels.windows import op  # noqa: F401  (it registers itself)
from mssar.partition import accumulation, as_type
from mssar.scales import Nested, Pools, Products, Separate, Strategy, coordinate_sets
from mssar.tracing import recorded

if TYPE_CHECKING:
    from jaxtyping import Float

CODES = {"regional": 0, "sliding": 1}  # of strategies, in files: never to be changed
OWN = 1 << 32  # and of users' own, by their names


def weights(gates: Sequence[Float[Tensor, "N C _ _"]]) -> list[Float[Tensor, "N C _ _"]]:
    r"""$Z^{(l)} = \sigma(g_l)$ on the regions of each scale, in float32 at least."""
    return [as_type(gate, accumulation(gate)).sigmoid() for gate in gates]


class MSSAR(nn.Module):
    """Rescale every neuron of a map by what it sees around it at several scales.

    Args:
        channels: channels of the map that is recalibrated, D.
        scales: one branch each; a regional scale K cuts the map into K × K regions.
        strategy: "regional" (a partition), "sliding" (a window around every position), or what
            makes a coordinate set of your own of a scale.
        reduction: each branch is max(1, ⌊D / (L · reduction)⌋) channels wide inside.
        context_channels: where given, the weights come from a second map with so many channels,
            passed as ``layer(x, context)``: the multi-stage recalibration of a DenseNet.
        backend: "reference" (plain PyTorch), "triton" (fused kernels), or "auto": the kernels for
            maps on a CUDA device, where Triton is installed.

    ``branches[l]`` holds ``reduce``, ``norm1``, ``expand`` and ``norm2`` of ``scales[l]``.
    ``MSSAR(channels, scales=(1,))`` is Squeeze-and-Excitation with batch normalisation.

    The buffer ``coordinates`` says what the weights were trained for, a code for the strategy and
    the scales. It travels with them, and a layer made for others refuses them. Nothing reads it
    but :meth:`load_state_dict`: the attributes decide what is computed.
    """

    coordinates: Tensor

    def __init__(
        self,
        channels: int,
        scales: Sequence[int] = (1, 2, 4),
        strategy: Strategy = "regional",
        reduction: int = 1,
        context_channels: int | None = None,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_backend(backend)
        require_count("channels", channels)
        require_count("reduction", reduction)
        if context_channels is not None:
            require_count("context_channels", context_channels)
        self.sets = coordinate_sets(strategy, scales)
        self.channels = channels
        self.scales = tuple(s.scale for s in self.sets.sets)
        self.strategy = strategy
        self.reduction = reduction
        self.context_channels = context_channels
        self.backend = backend
        if channels < len(self.scales):
            raise ValueError(
                "MSSAR needs at least one hidden channel a scale: "
                f"{channels} channels, {len(self.scales)} scales"
            )
        inputs = channels if context_channels is None else context_channels
        hidden = max(1, channels // (len(self.scales) * reduction))
        self.branches = nn.ModuleList(
            Branch(inputs, hidden, channels, device=device, dtype=dtype) for _ in self.scales
        )
        code = torch.tensor(self._code(), dtype=torch.int64, device=device)
        self.register_buffer("coordinates", code)

    def reset_parameters(self) -> None:
        """Begin anew; also what was made on the meta device and then given memory."""
        for branch in self.branches:
            if isinstance(branch, Branch):
                branch.reset_parameters()
        self._write_coordinates()

    def forward(
        self, x: Float[Tensor, "N C H W"], context: Float[Tensor, "N B H W"] | Pools | None = None
    ) -> Float[Tensor, "N C H W"]:
        """``x`` times its importance; the same shape, dtype and memory format.

        ``context`` may be given as what :meth:`pool` made of it, so that a network which keeps
        adding channels to one map need not pool them all again at every step.

        Traced by torch.fx, a call is one node.
        """
        if not isinstance(x, Tensor):
            return self._recorded(x, context)  # type: ignore[unreachable]
        if context is None and self.context_channels is None and self.strategy == "regional":
            made = fused.tail(x, self)
            if made is not None:
                return made
        x = settled(x)
        sets = self._sets_here()
        z = sets.average(weights(self._gates(x, context)), size_of(x))
        return sets.multiply(x, as_type(z, x.dtype))

    @overload
    def importance(
        self, x: Tensor, context: Tensor | Pools | None = None, *, per_scale: Literal[False] = False
    ) -> Tensor: ...
    @overload
    def importance(
        self, x: Tensor, context: Tensor | Pools | None = None, *, per_scale: Literal[True]
    ) -> list[Tensor]: ...

    def importance(
        self,
        x: Float[Tensor, "N C H W"],
        context: Float[Tensor, "N B H W"] | Pools | None = None,
        *,
        per_scale: bool = False,
    ) -> Float[Tensor, "N C H W"] | list[Float[Tensor, "N C H W"]]:
        """The weights Z; with ``per_scale`` a list, one map a scale, of which Z is the mean.

        In training mode BN takes the batch's statistics and updates its running ones, as forward
        does: look at weights in ``eval()``.
        """
        require_tensor("x", x)
        size, sets = size_of(x), self._sets_here()
        by_scale = weights(self._gates(x, context))
        if not per_scale:
            return sets.spread(sets.average(by_scale, size), size).to(x.dtype)
        return [z.to(x.dtype) for z in sets.spread_each(by_scale, size)]

    def pool(self, context: Float[Tensor, "N B H W"]) -> Pools:
        """What this layer needs to know of a map, to be passed for it as context."""
        require_tensor("context", context)
        if isinstance(self.sets, Separate) and chosen(self.backend, context):
            radii = self.sets.radii(size_of(context))
            if radii is not None:
                require_map("context", context)
                maps = torch.ops.mssar.window_means(context, radii)
                return Pools(tuple(maps), size_of(context), self.sets)
        return self._sets_here().pool(context)

    def _sets_here(self) -> Nested | Separate | Products:
        return self.sets.as_products() if exporting() else self.sets

    def _recorded(self, x: Any, context: Any) -> Any:
        if not isinstance(x, Proxy):
            require_tensor("x", x)
        return recorded(self, x) if context is None else recorded(self, x, context)

    def _gates(self, x: Tensor, context: Tensor | Pools | None) -> list[Tensor]:
        require_map("x", x)
        if x.shape[1] != self.channels:
            raise ValueError(f"MSSAR was made for {self.channels} channels; got {tuple(x.shape)}")
        pools = self._source(x, context)
        by_scale = pools.sets.by_scale(pools)
        branches = cast("Sequence[Branch]", self.branches)
        for scale, branch, y in zip(self.scales, branches, by_scale, strict=True):
            values = y.shape[0] * y.shape[2] * y.shape[3]
            if values == 1 and branch.normalises_the_batch:
                raise ValueError(
                    f"BN cannot train on a single value per channel: scale {scale} of a batch of "
                    "one has one region; use a larger batch, or eval()"
                )
            if isinstance(pools.sets, Products) and branch.normalises_the_batch:
                pools.sets.require_filled(pools.size)
        return [branch(y) for branch, y in zip(branches, by_scale, strict=True)]

    def _source(self, x: Tensor, context: Tensor | Pools | None) -> Pools:
        if self.context_channels is None:
            if context is not None:
                raise ValueError("unexpected context: this MSSAR was made without context_channels")
            return self.pool(x)
        if context is None:
            raise ValueError(
                f"missing context: this MSSAR takes its weights from {self.context_channels} "
                "channels of another map, so call layer(x, context)"
            )
        if not isinstance(context, Pools):
            require_map("context", context)
            context = self.pool(context)
        if context.sets != (sets := self._sets_here()):
            raise ValueError(f"context was pooled for {context.sets}; this layer needs {sets}")
        batch, channels = context.maps[0].shape[:2]
        if channels != self.context_channels:
            raise ValueError(
                f"context has {channels} channels; this MSSAR takes {self.context_channels}"
            )
        if batch != x.shape[0] or context.size != size_of(x):
            raise ValueError(
                f"context has batch {batch} and size {context.size}; "
                f"x has batch {x.shape[0]} and size {size_of(x)}, and they must agree"
            )
        return context

    # --- what travels with the weights ---

    def _code(self) -> list[int]:
        if isinstance(self.strategy, str):
            return [CODES[self.strategy], *self.scales]
        return [OWN + zlib.crc32(_name(self.strategy).encode()), *self.scales]

    def _write_coordinates(self) -> None:
        if not watched(self.coordinates) and not self.coordinates.is_inference():
            code = torch.tensor(self._code(), device="cpu")
            with torch.no_grad():  # nor wait for a GPU: averages ask for the state at every step
                self.coordinates.copy_(code, non_blocking=self.coordinates.is_cuda)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        # Averages of weights may have cut whole numbers off: 3 · 0.9995 + 3 · 0.0005 to 2.
        self._write_coordinates()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key, code = f"{prefix}coordinates", self._code()
        found = state_dict.get(key)
        if type(found) is Tensor and not found.is_meta:
            theirs = _rounded(found)
            as_cast = _rounded(torch.tensor(code, device="cpu").to(found.dtype))
            if theirs not in (code, as_cast):
                error_msgs.append(
                    f"{key}: the weights were trained for {_described(theirs)}, "
                    f"this MSSAR is made for {_described(code)}"
                )
        if found is None or isinstance(found, Tensor):
            # Its own, whatever was found: older files have none. It lies where the others do.
            others = (t for n, t in state_dict.items() if n.startswith(prefix))
            near = next((t for t in others if isinstance(t, Tensor)), self.coordinates)
            state_dict[key] = torch.tensor(code, device=near.device)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        strategy = self.strategy if isinstance(self.strategy, str) else _name(self.strategy)
        said = f"{self.channels}, scales={self.scales}, strategy={strategy!r}"
        said += f", reduction={self.reduction}"
        if self.context_channels is not None:
            said += f", context_channels={self.context_channels}"
        if self.backend != "auto":
            said += f", backend={self.backend!r}"
        return said


def _name(strategy: object) -> str:
    return str(getattr(strategy, "__qualname__", type(strategy).__qualname__))


def _rounded(found: Tensor) -> list[int]:
    """Also of an average of floats, or of what is no number."""
    return [round(n) for n in found.flatten().double().nan_to_num(nan=-1.0).tolist()]


def _described(code: Sequence[int]) -> str:
    if not code:
        return "nothing that it says"
    names = {number: name for name, number in CODES.items()}
    other = f"a strategy of one's own ({code[0]})," if code[0] >= OWN else f"strategy {code[0]}"
    return f"{names.get(code[0], other)} scales {', '.join(map(str, code[1:]))}"
