"""Image folders: what is listed, how images are cut and turned, the same whoever reads them."""

import os
import shutil
import signal
import sys

import pytest
import torch
import torch.multiprocessing
from PIL import Image
from test_augmentation import PLAIN, STRONG
from test_pictures import encoded, picture, pixels

from mssar.lab.data import imagefolder, photographs, pictures, transforms
from mssar.lab.data.imagefolder import Tally, open_folder
from mssar.lab.engine.weights import shares
from mssar.surgery import foreign

pytestmark = pytest.mark.usefixtures("torchvision")

CPU = torch.device("cpu")


@pytest.fixture
def tree(tmp_path):
    """Two classes; 5 and 3 images for training, 2 and 1 for testing, all different, 24 × 18."""
    for number, (split, name, count) in enumerate(
        [("train", "cat", 5), ("train", "dog", 3), ("val", "cat", 2), ("val", "dog", 1)]
    ):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        for i in range(count):
            picture(24, 18, 10 * number + i).save(folder / f"{i}.png")
    return tmp_path


def read(folder, orders, augmentation=STRONG, *, tally=None, train=True, workers=0, **more):
    files = folder.train if train else folder.test
    fixed = {"train": train, "seed": 1, "epoch": 0, "device": CPU, "decode": "workers", **more}
    tally = Tally() if tally is None else tally
    found = photographs.batches(
        files, folder.root, orders, augmentation, workers=workers, tally=tally, **fixed
    )
    return list(found)


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        torch.equal(a, b)
        for one, two in zip(ours, theirs, strict=True)
        for a, b in zip(one, two, strict=True)
    )


# The listing


def test_lists_images_with_the_numbers_of_their_classes(tree):
    for name in (".hidden.png", "notes.txt", "Thumbs.db"):
        (tree / "train" / "cat" / name).write_bytes(b"")
    shutil.move(tree / "train" / "dog" / "0.png", tree / "train" / "dog" / "0.JPEG")
    (tree / "train" / ".git").mkdir()
    (tree / "train" / "README").write_text("")
    folder = open_folder(tree)
    assert folder.classes == ("cat", "dog")
    cats = [f"train/cat/{i}.png" for i in range(5)]
    assert [*folder.train.paths] == [
        *cats,
        "train/dog/0.JPEG",
        "train/dog/1.png",
        "train/dog/2.png",
    ]
    assert folder.train.labels.tolist() == [0] * 5 + [1] * 3
    assert [*folder.test.paths] == ["val/cat/0.png", "val/cat/1.png", "val/dog/0.png"]
    assert folder.test.paths[-1] == "val/dog/0.png"
    assert (len(folder.train), len(folder.test), folder.name) == (8, 3, "imagefolder")
    with pytest.raises(IndexError):
        folder.train.paths[8]


@pytest.mark.skipif(sys.platform != "linux", reason="needs names that are any bytes")
def test_names_may_be_any_bytes(tree):
    odd = os.fsdecode(b"\xff\xfe \n.png")
    shutil.move(tree / "train" / "cat" / "4.png", tree / "train" / "cat" / odd)
    path = open_folder(tree).train.paths[4]
    assert path == f"train/cat/{odd}"
    assert (tree / path).exists()


def test_the_checksum_is_of_names_and_sizes(tree):
    first = open_folder(tree).checksum
    assert first == open_folder(tree).checksum
    moved = shutil.copytree(tree, tree / "elsewhere" / "copy")
    assert open_folder(moved).checksum == first
    file = moved / "train" / "cat" / "0.png"
    contents = file.read_bytes()
    file.write_bytes(bytes(len(contents)))  # the contents are not read
    assert open_folder(moved).checksum == first
    seen = {first}
    for change in (
        lambda: file.write_bytes(contents + b"\0"),
        lambda: shutil.copy(file, moved / "val" / "dog" / "9.png"),
        lambda: file.rename(file.with_name("8.png")),
    ):
        change()
        assert open_folder(moved).checksum not in seen
        seen.add(open_folder(moved).checksum)


def test_says_what_a_tree_lacks(tree):
    with pytest.raises(ValueError, match=r"ilsvrc2012 has 1,000 classes.* has 2 classes, 8 train"):
        open_folder(tree, "ilsvrc2012", imagefolder.ILSVRC2012)
    assert open_folder(tree, expected=(2, 8, 3)).name == "imagefolder"
    (tree / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match=r"same classes: 1 only in train \(emu\)"):
        open_folder(tree)
    (tree / "val" / "emu").mkdir()
    with pytest.raises(ValueError, match=r"classes without images \(jpg.*train/emu"):
        open_folder(tree)
    shutil.rmtree(tree / "val")
    with pytest.raises(ValueError, match="there is no folder val"):
        open_folder(tree)
    (tree / "val").mkdir()
    picture(4, 4).save(tree / "val" / "0.png")
    with pytest.raises(ValueError, match="val has no folders, one a class"):
        open_folder(tree)


# Batches


def test_batches_hold_the_images_asked_for_in_that_order(tree):
    folder = open_folder(tree)
    orders = [torch.tensor([7, 0, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([1])]
    found = read(folder, orders, PLAIN)
    assert [labels.tolist() for _, labels in found] == [[1, 0, 0], [], [0]]
    for order, (images, _) in zip(orders, found, strict=True):
        assert images.shape == (len(order), 3, 8, 8)
        assert images.is_contiguous(memory_format=torch.channels_last)
        for index, image in zip(order.tolist(), images, strict=True):
            whole = pictures.decode((tree / folder.train.paths[index]).read_bytes())
            transform = transforms.Transform(PLAIN, train=True, seed=1, epoch=0)
            expected = transform.whole(whole, transform.draw(whole, index))
            assert torch.equal(image.permute(1, 2, 0), expected)
    assert read(folder, []) == []


def test_draws_depend_on_seed_epoch_and_image_alone(tree, monkeypatch):
    monkeypatch.setattr(photographs, "PART", 2)
    folder = open_folder(tree)
    orders = [*torch.tensor([5, 2, 7, 0, 3, 1, 6, 4]).split(3)]
    state = torch.get_rng_state()
    whole = read(folder, orders)
    for workers in (1, 2):
        assert same(read(folder, orders, workers=workers), whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(read(folder, orders[1:], workers=1), whole[1:])  # resumed after a step
    shards = [read(folder, [order[rank::2] for order in orders]) for rank in range(2)]
    for number, (images, labels) in enumerate(whole):
        for rank in range(2):
            assert same([shards[rank][number]], [(images[rank::2], labels[rank::2])])
    assert not same(read(folder, orders, epoch=1), whole)
    assert not same(read(folder, orders, seed=2), whole)
    tested = read(folder, [torch.arange(3)], train=False)
    assert same(read(folder, [torch.arange(3)], train=False, epoch=1, workers=1), tested)


def test_the_default_augmentation_differs_from_image_to_image(tree):
    folder = open_folder(tree)
    (images, _), (again, _) = read(folder, [torch.zeros(4, dtype=torch.int64)] * 2)
    assert torch.equal(images, again)  # the same image in the same epoch
    assert (images == images[:1]).all()
    seeds = {transforms.seed_of(s, e, i) for s in range(9) for e in range(9) for i in range(99)}
    assert len(seeds) == 9 * 9 * 99
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


# Unreadable images


def spoil(path, how):
    path.unlink()
    if how == "directory":
        path.mkdir()
    elif how == "link":
        path.symlink_to("nowhere")
    else:
        jpeg = encoded(picture(64, 64), "JPEG")
        path.write_bytes({"empty": b"", "text": b"hello, world", "truncated": jpeg[:-40]}[how])


@pytest.mark.parametrize("how", ["empty", "text", "truncated", "directory", "link"])
@pytest.mark.parametrize("workers", [0, 1])
def test_for_an_unreadable_image_the_next_stands_in(tree, how, workers):
    good = read(open_folder(tree), [torch.arange(8)])
    spoil(tree / "train" / "dog" / "1.png", how)
    told = []
    tally = Tally(lambda path, reason: told.append((path, reason)), share=0.5)
    folder = open_folder(tree)
    for _ in range(2):
        ((images, labels),) = read(folder, [torch.arange(8)], workers=workers, tally=tally)
    assert labels.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert torch.equal(images[6], images[7])  # nothing black for norms, and a mean of eight
    kept = [0, 1, 2, 3, 4, 5, 7]
    assert torch.equal(images[kept], good[0][0][kept])
    ((path, reason),) = told  # once, though read twice
    assert path == tree / "train" / "dog" / "1.png"
    assert reason
    assert "\n" not in reason
    assert "0x" not in reason
    assert (tally.read, tally.unreadable) == (16, 2)


def test_in_tests_an_unreadable_image_is_not_counted(tree):
    spoil(tree / "val" / "cat" / "1.png", "text")
    ((images, labels),) = read(
        open_folder(tree), [torch.arange(3)], train=False, tally=Tally(share=1)
    )
    assert labels.tolist() == [0, -100, 1]
    assert not images[1].any()


def test_the_first_stands_in_for_the_last(tree):
    spoil(tree / "train" / "dog" / "2.png", "text")
    ((images, labels),) = read(open_folder(tree), [torch.tensor([4, 5, 7])], tally=Tally(share=1))
    assert labels.tolist() == [0, 1, 0]
    assert torch.equal(images[2], images[0])


def test_one_class_is_refused(tree):
    for split in ("train", "val"):
        shutil.rmtree(tree / split / "dog")
    with pytest.raises(ValueError, match=r"at least two classes are needed; .* has one, cat$"):
        open_folder(tree)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_refused(tree):
    os.mkfifo(tree / "train" / "cat" / "9.png")
    with pytest.raises(ValueError, match=r"9\.png: not a regular file"):
        open_folder(tree)


def test_a_decompression_bomb_is_unreadable(tree, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 400)  # the images have 432: a mere warning
    tally = Tally(share=1)
    ((_, labels),) = read(open_folder(tree), [torch.arange(8)], tally=tally)
    assert labels.tolist() == [-100] * 8
    assert "decompression bomb" in next(iter(tally.files.values()))


def test_too_many_unreadable_images_stop_the_run(tree):
    spoil(tree / "train" / "cat" / "2.png", "text")
    folder = open_folder(tree)
    with pytest.raises(
        ValueError, match=r"1 of 8 images .* 12\.50%; 1\.00% would .*cat.2.png \(no"
    ):
        read(folder, [torch.arange(4), torch.arange(4, 8)])  # at the end of the epoch
    tally = Tally(patience=4)
    with pytest.raises(ValueError, match="1 of 4 images"):
        read(folder, [torch.arange(4), torch.arange(4, 8)], tally=tally, workers=1)
    read(folder, [torch.arange(8)], tally=Tally(share=0.125))
    tally = Tally()
    tally.add(99, [])
    tally.add(1, [(tree, "bad")])
    with pytest.raises(ValueError, match=r"2 of 101 .*1\.98%"):
        tally.add(1, [(tree, "bad")])


# Workers


def children():
    return {process.pid for process in torch.multiprocessing.active_children()}


def test_closing_early_leaves_no_worker_behind(tree):
    before = children()
    folder = open_folder(tree)
    orders = [torch.arange(8)] * 40
    options = {"train": True, "seed": 1, "epoch": 0, "device": CPU, "tally": Tally()}
    found = photographs.batches(folder.train, tree, orders, STRONG, workers=2, **options)
    assert children() == before  # none before the first is asked for
    next(found)
    assert len(children() - before) == 2
    found.close()
    assert children() == before


def test_ctrl_c_is_not_the_workers_affair_and_their_death_is_explained(tree, capfd):
    before = children()
    folder = open_folder(tree)
    options = {"train": True, "seed": 1, "epoch": 0, "device": CPU, "tally": Tally()}
    orders = [torch.arange(8)] * 60
    found = photographs.batches(folder.train, tree, orders, STRONG, workers=1, **options)
    next(found)
    (worker,) = children() - before
    os.kill(worker, signal.SIGINT)
    next(found)
    assert children() - before == {worker}

    def killed():
        os.kill(worker, signal.SIGKILL)
        list(found)

    # torch may notice while it waits, or by a signal while something else runs.
    with pytest.raises(RuntimeError, match=r"images died.*fewer workers|killed by signal"):
        killed()
    found.close()
    assert children() == before
    assert "Traceback" not in capfd.readouterr().err


# The GPU's way, with a decoder that runs here


@pytest.fixture
def decoder(monkeypatch):
    """A stand-in that refuses every file with a mark in it, and all given with it."""
    calls = []

    def decode_jpegs(files, device):
        calls.append(len(files))
        contents = [file.numpy().tobytes() for file in files]
        if any(b"refuse me" in data for data in contents):
            raise RuntimeError("refused")
        return [pixels(pictures.decode(data)).permute(2, 0, 1).to(device) for data in contents]

    monkeypatch.setattr(pictures, "decode_jpegs", decode_jpegs)
    monkeypatch.setattr(pictures, "gpu_refuses", lambda _: "")
    return calls


@pytest.mark.parametrize("workers", [0, 1])
def test_bytes_decoded_elsewhere_give_the_same_batches(tree, decoder, workers):
    cats = tree / "train" / "cat"
    jpeg = encoded(picture(24, 18, 1), "JPEG", comment=b"refuse me")
    (cats / "0.png").write_bytes(jpeg)  # refused, but Pillow can
    (cats / "1.png").write_bytes(jpeg[:-200] + b"refuse me" + bytes(100) + b"\xff\xd9")
    (cats / "2.png").write_bytes(encoded(picture(24, 18, 2), "JPEG"))
    spoil(cats / "3.png", "text")
    folder = open_folder(tree)
    tallies = Tally(share=1), Tally(share=1)
    ours = read(folder, [torch.arange(8)], PLAIN, tally=tallies[0], decode="gpu", workers=workers)
    theirs = read(folder, [torch.arange(8)], PLAIN, tally=tallies[1])
    for (images, labels), (expected, numbers) in zip(ours, theirs, strict=True):
        assert (images.int() - expected.int()).abs().max() <= 1  # Pillow and torch round apart
        assert torch.equal(labels, numbers)
    assert tallies[0].files.keys() == tallies[1].files.keys()
    assert decoder == [3, 1, 1, 1]
    decoder.clear()
    ((images, _),) = read(folder, [torch.tensor([2, 2])], PLAIN, decode="gpu", workers=workers)
    assert (images.int() - theirs[0][0][[2, 2]].int()).abs().max() <= 1
    assert decoder == [2]  # together


def test_auto_decodes_in_workers_without_a_gpu(tree, monkeypatch):
    assert photographs.choose_decoder("auto", CPU, 2) == "workers"
    with pytest.raises(ValueError, match="on the GPU: the device is cpu, not CUDA; workers can"):
        photographs.choose_decoder("gpu", CPU, 2)
    with pytest.raises(ValueError, match="0 or more; got -1"):
        read(open_folder(tree), [], workers=-1)
    black = torch.zeros(3, 32, 32, dtype=torch.uint8)
    monkeypatch.setattr(pictures, "decode_jpegs", lambda *_: [black])
    pictures.gpu_refuses.cache_clear()
    assert "other colours" in pictures.gpu_refuses(torch.device("cuda", 0))
    pictures.gpu_refuses.cache_clear()


def test_without_torchvision_says_how_to_get_it(tree, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[images\]' in a clone"):
        read(open_folder(tree), [])


def test_imagenets_colours_are_those_that_networks_were_trained_with():
    """Of 255 here and of 1 there: neither is the other exactly, once multiplied."""
    assert shares(imagefolder.MEAN) == list(foreign.IMAGENET[0])
    assert shares(imagefolder.STD) == list(foreign.IMAGENET[1])
