"""What a layer refuses, and what it says: what was got, and what would do."""

import copy

import numpy as np
import oracle
import pytest
import torch
from test_layer import EXACT, maps, randomise

from mssar import MSSAR


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scales": ()}, r"different whole numbers, such as \(1, 2, 4\); got \(\)"),
        ({"scales": (1, 2, 2)}, r"different whole numbers.*got \(1, 2, 2\)"),
        ({"scales": (0, 1)}, r"whole number of at least 1.*got 0"),
        ({"scales": (2, -4)}, r"whole number of at least 1.*got -4"),
        ({"channels": 2}, r"at least one hidden channel a scale: 2 channels, 3 scales"),
        ({"reduction": 0}, r"reduction.*at least 1.*got 0"),
        ({"reduction": -2}, r"reduction.*at least 1.*got -2"),
        ({"scales": 4}, r"sequence, such as \(1, 2, 4\); got 4"),
        ({"channels": 0}, r"channels.*at least 1.*got 0"),
        ({"strategy": "round"}, r"one of regional, sliding.*got 'round'"),
        ({"context_channels": 0}, r"context_channels.*at least 1.*got 0"),
    ],
)
def test_layers_that_cannot_be(unchecked, kwargs, message):
    with pytest.raises(ValueError, match=message):
        unchecked.MSSAR(**{"channels": 6, **kwargs})


@pytest.mark.parametrize("context_channels", [None, 5])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 5, 4, 4), r"made for 6 channels; got \(2, 5, 4, 4\)"),
        ((6, 4, 4), r"N C H W .*got .*\(6, 4, 4\)"),
        ((2, 6, 4, 4, 4), r"N C H W .*got .*\(2, 6, 4, 4, 4\)"),
    ],
)
def test_maps_that_do_not_fit(unchecked, shape, message, context_channels):
    layer = unchecked.MSSAR(6, context_channels=context_channels)
    context = [torch.randn(2, context_channels, 4, 4)] if context_channels else []
    for call in (layer, layer.importance):
        with pytest.raises(ValueError, match=message):
            call(torch.randn(shape), *context)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 4, 8, 8), r"context has 4 channels; .* takes 5"),
        ((2, 5, 8, 9), r"size \(8, 9\); x has .*size \(8, 8\).*must agree"),
        ((2, 5, 4, 4), r"size \(4, 4\); x has .*size \(8, 8\).*must agree"),
        ((3, 5, 8, 8), r"batch 3 .*x has batch 2.*must agree"),
        ((1, 5, 8, 8), r"batch 1 .*x has batch 2.*must agree"),
    ],
)
def test_contexts_that_do_not_fit(unchecked, shape, message, pooled):
    layer, context = unchecked.MSSAR(6, context_channels=5), torch.randn(shape)
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(2, 6, 8, 8), layer.pool(context) if pooled else context)


def test_a_context_of_three_dimensions(unchecked):
    layer = unchecked.MSSAR(6, context_channels=5)
    with pytest.raises(ValueError, match=r"context is a map N C H W .*\(5, 8, 8\)"):
        layer(torch.randn(2, 6, 8, 8), torch.randn(5, 8, 8))


def test_contexts_missing_and_unexpected(unchecked):
    x, context = torch.randn(2, 6, 8, 8), torch.randn(2, 5, 8, 8)
    with pytest.raises(ValueError, match=r"missing context.*5 channels.*layer\(x, context\)"):
        unchecked.MSSAR(6, context_channels=5)(x)
    layer = unchecked.MSSAR(6)
    for unexpected in (context, x, layer.pool(x)):
        with pytest.raises(ValueError, match=r"unexpected context.*without context_channels"):
            layer(x, unexpected)


@pytest.mark.parametrize(
    "other", [{"scales": (1, 2)}, {"scales": (4, 2, 1)}, {"strategy": "sliding"}]
)
def test_pools_made_for_other_scales(unchecked, other):
    layer = unchecked.MSSAR(6, context_channels=5)
    pools = unchecked.MSSAR(6, context_channels=5, **other).pool(torch.randn(2, 5, 8, 8))
    with pytest.raises(ValueError, match=r"context was pooled for .*; this layer needs .*scale=4"):
        layer(torch.randn(2, 6, 8, 8), pools)


@pytest.mark.parametrize(
    ("strategy", "scales", "size"),
    [("regional", (2, 1), (4, 4)), ("regional", (2, 3), (1, 1)), ("sliding", (2, 3), (1, 1))],
)
def test_one_value_a_channel_cannot_train(unchecked, strategy, scales, size):
    torch.manual_seed(0)
    layer = randomise(unchecked.MSSAR(6, scales, strategy, dtype=torch.float64))
    x = maps(1, 6, *size)
    before = copy.deepcopy(layer.state_dict())
    norms = [norm for branch in layer.branches for norm in (branch.norm1, branch.norm2)]

    for frozen in ([], norms[::2], norms[1::2]):  # half of the norms frozen is not enough
        layer.train()
        for norm in frozen:
            norm.eval()
        with pytest.raises(ValueError, match=r"single value per channel: scale \d.*larger batch"):
            layer(x)
        for name, value in layer.state_dict().items():
            assert torch.equal(value, before[name]), name

    expected = oracle.mssar(x, None, before, scales=scales, strategy=strategy, training=False)
    torch.testing.assert_close(layer.eval()(x), expected.y, **EXACT)
    layer.train()
    for norm in norms:
        norm.eval()
    torch.testing.assert_close(layer(x), expected.y, **EXACT)


def test_pools_of_other_maps_do_not_extend():
    layer, other = MSSAR(6, context_channels=5), MSSAR(6, scales=(1, 2), context_channels=5)
    pools = layer.pool(torch.randn(2, 2, 8, 8))
    with pytest.raises(ValueError, match=r"size and sets: 2, \(8, 8\).*got 2, \(16, 16\)"):
        pools.extend(layer.pool(torch.randn(2, 3, 16, 16)))
    with pytest.raises(ValueError, match=r"scale=4.*got 2, \(8, 8\)"):
        pools.extend(other.pool(torch.randn(2, 3, 8, 8)))
    with pytest.raises(ValueError, match=r"same batch.*got 3, "):
        pools.extend(layer.pool(torch.randn(3, 3, 8, 8)))


@pytest.mark.parametrize("shape", [(2, 6, 0, 4), (2, 6, 4, 0)])
def test_a_map_without_positions_is_refused(unchecked, shape):
    with pytest.raises(ValueError, match=r"H and W at least 1; got"):
        unchecked.MSSAR(6)(torch.ones(shape))
    with pytest.raises(ValueError, match=r"reduction.*got 1.5"):
        unchecked.MSSAR(6, reduction=1.5)


def test_norms_that_look_beyond_the_batch_are_not_refused(unchecked):
    x = torch.randn(1, 6, 4, 4)
    layer = unchecked.MSSAR(6, scales=(1,))
    for branch in layer.branches:
        branch.norm1 = branch.norm2 = torch.nn.Identity()
    torch.testing.assert_close(layer(x), x * layer.importance(x))
    synchronised = torch.nn.SyncBatchNorm.convert_sync_batchnorm(unchecked.MSSAR(6))
    assert not any(branch.normalises_the_batch for branch in synchronised.branches)
    assert all(branch.normalises_the_batch for branch in unchecked.MSSAR(6).branches)


def test_whole_numbers_are_no_map(unchecked):
    with pytest.raises(ValueError, match=r"floating point.*got torch.int64"):
        unchecked.MSSAR(6)(torch.ones(2, 6, 4, 4, dtype=torch.int64))


NOT_TENSORS = [
    (np.ones((2, 6, 4, 4), np.float32), "ndarray"),
    (None, "NoneType"),
    ("x.png", "str"),
    ([[1.0]], "list"),
]


@pytest.mark.parametrize(("given", "kind"), NOT_TENSORS, ids=[kind for _, kind in NOT_TENSORS])
@pytest.mark.parametrize("options", [{}, {"strategy": "sliding"}, {"backend": "triton"}])
def test_what_is_no_tensor_is_said(unchecked, given, kind, options):
    layer, x = unchecked.MSSAR(6, **options), torch.randn(2, 6, 4, 4)
    network = unchecked.create_model("resnet8", "mssar", **options)
    for call, what in (
        *((layer, "x"), (layer.importance, "x"), (layer.pool, "context")),
        (network, "x"),
    ):
        with pytest.raises(
            ValueError, match=f"^{what} is a map N C H W, a torch.Tensor; got {kind}$"
        ):
            call(given)
    for norm in (None, torch.nn.BatchNorm2d(6)):
        with pytest.raises(ValueError, match=f"^y is a map .*; got {kind}$"):
            unchecked.tail(given, norm, layer)
        if given is not None:
            with pytest.raises(ValueError, match=f"^shortcut is a map .*; got {kind}$"):
                unchecked.tail(x, norm, layer, given)
    if given is not None:
        layer = unchecked.MSSAR(6, context_channels=5, **options)
        with pytest.raises(ValueError, match=f"^context is a map .*; got {kind}$"):
            layer(x, given)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recalibrate": None}, "recalibrate is a module; got None"),
        ({"norm": "bn"}, "norm is a module; got 'bn'"),
        ({"shortcut": torch.ones(2, 5, 4, 4)}, r"shape \(2, 6, 4, 4\); got \(2, 5, 4, 4\)"),
        ({"shortcut": torch.ones(2, 6, 3, 4)}, r"shape \(2, 6, 4, 4\); got \(2, 6, 3, 4\)"),
        ({"activation": ["relu"]}, r"activation is .*; got \['relu'\]"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_what_no_block_can_end_in_is_said(unchecked, monkeypatch, change, message, backend):
    monkeypatch.setattr("mssar.fused.chosen", lambda backend, _: backend != "reference")
    given = {"norm": None, "recalibrate": unchecked.MSSAR(6, backend=backend)}
    with pytest.raises(ValueError, match=message):
        unchecked.tail(torch.randn(2, 6, 4, 4), **{**given, **change})


def test_other_troubles_of_an_addition_are_its_own(unchecked):
    x, layer = torch.randn(2, 6, 4, 4), torch.nn.Identity()
    with pytest.raises(RuntimeError, match="meta"):
        unchecked.tail(x, None, layer, x.to("meta"))
    once = torch.randn(1, 6, 1, 1)
    torch.testing.assert_close(unchecked.tail(x, None, layer, once), (x + once).relu())


@pytest.mark.parametrize("size", [5, None, (5,), (5, 5, 5), "55"])
@pytest.mark.parametrize("kind", ["Regional", "Sliding"])
def test_a_size_is_of_two_numbers(unchecked, kind, size):
    with pytest.raises(ValueError, match=r"size is that of a map, \(H, W\); got "):
        getattr(unchecked, kind)(2).spread(torch.ones(1, 1, 2, 2), size)
