"""What a disk may hold after a power cut, as far as nothing forbids it.

Content that was not synced may be there, in part, as zeros, or not at all; names in a folder that
was not synced may be there or not, whatever their order. To sync a file says nothing of its name,
and to sync a folder nothing of the files in it. A rename happens or does not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from faults.calls import Call

Tree = dict[str, bytes]  # by path; folders end in a slash
Names = dict[int, dict[str, int]]  # what the names in every folder name
Change = tuple[int, str, int | None]  # a folder, a name in it, and what that then names


@dataclass
class File:
    synced: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)  # where; None: the end

    def content(self, done: int | None = None) -> bytes:
        """After some of what is pending; all of it by default."""
        made = bytearray(self.synced)
        for at, data in self.pending[:done]:
            if data is None:
                del made[at:]
                made.extend(bytes(at - len(made)))
            else:
                made.extend(bytes(at - len(made)))
                made[at : at + len(data)] = data
        return bytes(made)

    def possible(self) -> list[bytes]:
        """What it may hold after a cut."""
        found = [self.content(n) for n in range(len(self.pending) + 1)]
        for n, (at, data) in enumerate(self.pending):
            if data:
                before, half = self.content(n), len(data) // 2
                whole = self.content(n + 1)
                found.append(whole[: at + half] + before[at + half :])  # cut off
                found.append(whole[:at] + bytes(half) + whole[at + half :])  # out of order
                found.append(whole[:at] + bytes(len(data)) + whole[at + len(data) :])  # its length
        return list(dict.fromkeys(found))


@dataclass
class Folder:
    synced: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)


class Disk:
    """A folder and all in it, as a program sees it and as the disk has it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: dict[int, File | Folder] = {}
        self.pending: list[list[Change]] = []  # of names, in the order in which they were made
        self._read(root)

    def _read(self, place: Path) -> int:
        """What lies there already is on the disk."""
        number = len(self.nodes)
        if not place.is_dir():
            self.nodes[number] = File(place.read_bytes())
            return number
        folder = self.nodes[number] = Folder()
        for path in sorted(place.iterdir()):
            folder.now[path.name] = self._read(path)
        folder.synced = dict(folder.now)
        return number

    def _folder(self, path: Path) -> int:
        found = 0
        for name in path.relative_to(self.root).parts:
            folder = self.nodes[found]
            assert isinstance(folder, Folder)
            found = folder.now[name]
        return found

    def _change(self, *changes: Change) -> None:
        for number, name, node in changes:
            folder = self.nodes[number]
            assert isinstance(folder, Folder)
            _set(folder.now, name, node)
        self.pending.append(list(changes))

    def make(self, call: Call) -> None:
        """What a call does."""
        if call.path == self.root:
            parent, name, node = 0, "", 0
        else:
            parent, name = self._folder(call.path.parent), call.path.name
            above = self.nodes[parent]
            assert isinstance(above, Folder)
            node = above.now.get(name, -1)
        there = self.nodes.get(node)
        if call.kind in ("open", "mkdir") and there is None:
            number = len(self.nodes)
            self.nodes[number] = File() if call.kind == "open" else Folder()
            self._change((parent, name, number))
        elif call.kind == "open" and isinstance(there, File) and call.truncates:
            there.pending.append((0, None))
        elif call.kind in ("write", "truncate"):
            assert isinstance(there, File)
            there.pending.append((call.at, call.data if call.kind == "write" else None))
        elif call.kind == "fsync":
            self._sync(node)
        elif call.kind == "replace":
            assert call.target is not None
            other = self._folder(call.target.parent)
            self._change((parent, name, None), (other, call.target.name, node))
        elif call.kind in ("unlink", "rmdir") and there is not None:
            self._change((parent, name, None))

    def _sync(self, node: int) -> None:
        there = self.nodes[node]
        if isinstance(there, File):
            there.synced, there.pending = there.content(), []
            return
        for changes in [c for c in self.pending if any(number == node for number, _, _ in c)]:
            self.pending.remove(changes)
            self._have(changes, {n: f.synced for n, f in self._folders()})

    def _folders(self) -> list[tuple[int, Folder]]:
        return [(n, f) for n, f in self.nodes.items() if isinstance(f, Folder)]

    @staticmethod
    def _have(changes: list[Change], names: Names) -> None:
        for number, name, node in changes:
            _set(names[number], name, node)

    def now(self) -> Tree:
        """What the program sees."""
        return self._tree({n: f.now for n, f in self._folders()}, {})

    def after_a_cut(self, most: int, draw: random.Random) -> Iterator[Tree]:
        """What may be there: every possibility, or some of them where there are too many."""
        contents = {n: f.possible() for n, f in self.nodes.items() if isinstance(f, File)}
        loose = [n for n, found in contents.items() if len(found) > 1]
        kept = [[False, True]] * len(self.pending)
        choices = [*kept, *(range(len(contents[n])) for n in loose)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if count <= most:
            chosen: Iterator[tuple[int, ...]] = itertools.product(*choices)
        else:
            some = (tuple(draw.choice(list(c)) for c in choices) for _ in range(most))
            names = [tuple(n < k for n in range(len(kept))) for k in range(len(kept) + 1)]
            data = ([0] * len(loose), [len(contents[n]) - 1 for n in loose])
            edges = ((*order, *content) for order in names for content in data)
            chosen = itertools.chain(edges, some)
        for choice in chosen:
            names_now = {n: dict(f.synced) for n, f in self._folders()}
            for changes, there in zip(self.pending, choice, strict=False):
                if there:
                    self._have(changes, names_now)
            which = dict(zip(loose, choice[len(kept) :], strict=True))
            yield self._tree(names_now, {n: contents[n][k] for n, k in which.items()})

    def _tree(self, names: Names, contents: dict[int, bytes]) -> Tree:
        found: Tree = {}

        def walk(number: int, path: str) -> None:
            for name, node in sorted(names[number].items()):
                there = self.nodes[node]
                if isinstance(there, Folder):
                    found[f"{path}{name}/"] = b""
                    walk(node, f"{path}{name}/")
                else:
                    found[f"{path}{name}"] = contents.get(node, there.content())

        walk(0, "")
        return found


def _set(names: dict[str, int], name: str, node: int | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def lay(tree: Tree, place: Path) -> None:
    """Put such a tree into an empty folder."""
    for name, content in tree.items():
        if name.endswith("/"):
            (place / name).mkdir()
        else:
            (place / name).write_bytes(content)


def seen(place: Path) -> Tree:
    """A folder as such a tree."""
    found: Tree = {}
    for path in sorted(place.rglob("*")):
        folder = path.is_dir()
        found[f"{path.relative_to(place)}{'/' * folder}"] = b"" if folder else path.read_bytes()
    return found
