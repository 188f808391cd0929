"""Image folders on a CUDA device: the workers' batches there, and the device's own decoder."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mssar.lab.data import photographs, pictures
from mssar.lab.data.imagefolder import Tally, open_folder

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torchvision")]

# No class of the tests: worker processes import what they are sent.
CHOSEN = SimpleNamespace(
    size=64, resize=72, area=(0.2, 1.0), ratio=(3 / 4, 4 / 3), mirror=0.5, rotation=10.0, jitter=0.4
)


def picture(seed: int) -> Image.Image:
    rough = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((160 + seed, 120), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


SPOILT = (16, 17)
FILES = [encoded(picture(i), quality=95) for i in range(12)] + [
    encoded(picture(12), progressive=True),
    encoded(picture(13).convert("L")),
    encoded(picture(14).convert("CMYK")),
    encoded(picture(15), "PNG"),
    b"no image",
    encoded(picture(17))[:-60],
]


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        for name, numbers in (("one", range(9)), ("two", range(9, len(FILES)))):
            (tmp_path / split / name).mkdir(parents=True)
            for number in numbers:
                (tmp_path / split / name / f"{number:02}.jpg").write_bytes(FILES[number])
    return open_folder(tmp_path)


def read(folder, orders, device, *, train=True, decode="workers", workers=2):
    tally = Tally(share=1)
    found = photographs.batches(
        folder.train,
        folder.root,
        orders,
        CHOSEN,
        train=train,
        seed=1,
        epoch=0,
        device=torch.device(device),
        workers=workers,
        decode=decode,
        tally=tally,
    )
    return list(found), tally


@pytest.mark.parametrize("train", [True, False])
def test_workers_give_the_cpus_batches(folder, train):
    orders = [*torch.arange(len(FILES)).split(5)]
    torch.zeros(1, device="cuda")  # CUDA is in use: workers may not be forked
    seeded = torch.cuda.get_rng_state()
    expected, _ = read(folder, orders, "cpu", train=train, workers=0)
    found, tally = read(folder, orders, "cuda", train=train)
    for (images, labels), (pixels, numbers) in zip(found, expected, strict=True):
        assert images.is_cuda
        assert labels.is_cuda
        assert images.is_contiguous(memory_format=torch.channels_last)
        difference = (images.cpu().int() - pixels.int()).abs()
        # In training the device turns and jitters, and rounds once; Pillow rounds at every step.
        assert difference.max() <= (8 if train else 0)
        assert difference.float().mean() < 3
        assert torch.equal(labels.cpu(), numbers)
        assert (images[labels == photographs.IGNORED] == 0).all()
    assert tally.unreadable == len(SPOILT)
    assert torch.equal(torch.cuda.get_rng_state(), seeded)


@pytest.mark.parametrize("train", [True, False])
def test_the_devices_decoder_agrees_with_pillow(folder, train):
    if refusal := pictures.gpu_refuses(torch.device("cuda", 0)):
        pytest.skip(refusal)
    chosen = {n: photographs.choose_decoder("auto", torch.device("cuda", 0), n) for n in (2, 16)}
    assert chosen == {2: "gpu", 16: "workers"}
    orders = [*torch.arange(len(FILES)).split(7)]
    expected, theirs = read(folder, orders, "cpu", train=train, workers=0)
    found, ours = read(folder, orders, "cuda:0", train=train, decode="gpu")
    for (images, labels), (pixels, numbers) in zip(found, expected, strict=True):
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels.cpu(), numbers)
        # The same draws; decoders and resizing differ by some levels, another crop by dozens.
        difference = (images.cpu().int() - pixels.int()).abs().float().mean((1, 2, 3))
        assert difference.max() < 4, difference
    assert ours.files.keys() == theirs.files.keys()
    assert ours.unreadable == len(SPOILT)


def test_decoding_beside_other_work_is_safe(folder):
    """Memory that the main stream has just freed, and still reads, is not written over."""
    if refusal := pictures.gpu_refuses(torch.device("cuda", 0)):
        pytest.skip(refusal)
    orders = [torch.arange(12)] * 6
    found = photographs.batches(
        folder.train,
        folder.root,
        orders,
        CHOSEN,
        train=False,
        seed=1,
        epoch=0,
        device=torch.device("cuda", 0),
        workers=0,
        decode="gpu",
        tally=Tally(),
    )
    sums = []
    x = torch.randn(2048, 2048, device="cuda")
    for images, _ in found:
        for _ in range(20):
            x = (x @ x).tanh()
        sums.append(images.long().sum() + x.isnan().sum())
        del images
    assert len({int(total) for total in sums}) == 1
