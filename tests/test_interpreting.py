"""The hastened interpreter gives the language's numbers, and refuses what the language refuses."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")


@triton.jit
def table(out, rows: tl.constexpr, columns: tl.constexpr):
    i, j = tl.arange(0, rows), tl.arange(0, columns)
    tl.store(out + i[:, None] * columns + j[None, :], i[:, None] * 10 + j[None, :])


@triton.jit
def together(out, rows: tl.constexpr, columns: tl.constexpr):
    tl.store(out + tl.arange(0, rows), tl.arange(0, rows) + tl.arange(0, columns))


@triton.jit
def one(out, size: tl.constexpr):
    tl.store(out + tl.arange(0, 1), tl.full((size,), 1, tl.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16, torch.int64], ids=str)
def test_numbers_of_every_type(dtype):
    for rows, columns in ((4, 2), (2, 4), (4, 2)):  # seen before, the third time
        out = torch.empty(rows, columns, dtype=dtype)
        table[(1,)](out, rows, columns)
        i, j = torch.arange(rows), torch.arange(columns)
        assert torch.equal(out, (10 * i[:, None] + j).to(dtype))


def test_what_does_not_fit_is_refused_each_time():
    out = torch.empty(16, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(Exception, match="power of 2"):
            table[(1,)](out, 4, 3)
        with pytest.raises(Exception, match="incompatible dimensions"):
            together[(1,)](out, 4, 2)
        one[(1,)](out, 1)
        with pytest.raises(Exception, match="integer"):
            one[(1,)](out, True)
        together[(1,)](out, 4, 4)
        assert out[:4].tolist() == [0, 2, 4, 6]
