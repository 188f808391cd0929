"""Whether the other processes are still there.

One that is killed, or whose machine is taken away, leaves the others in the middle of a sum. Gloo
tells them when a connection breaks; NCCL waits for half an hour, and for a machine that is gone or
a process that is stopped so do both. So every process counts in the store that they met at: the
leader looks at all of the counts, the others at the leader's and at what it found. Whose count
stands still is lost, and the rest end with a line.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from mssar.lab.engine.world import World

PAUSE = 3.0  # seconds between two looks
PATIENCE = 12  # looks. Not seconds: whoever was frozen with all the others finds nobody lost
GONE = 1 << 40  # added to the count of one that left in good order
KEPT = "what was saved is kept, and --resume goes on, with any number of processes"


class Lookout:
    """What a process knows of those it depends on."""

    def __init__(self, world: World, store: Any) -> None:
        self.world, self.store = world, store
        self.watched = list(range(1, world.size)) if world.leads else [0]
        self.heard = dict.fromkeys(self.watched, 0)
        self._seen = dict(self.heard)
        self._silent = dict.fromkeys(self.watched, 0)
        self._told: int | None = None

    def talk(self) -> None:
        """Count, and listen. Where nobody answers any more this may wait for ever."""
        self.store.add(str(self.world.rank), 1)
        for rank in self.watched:
            self.heard[rank] = self.store.add(str(rank), 0)
        if not self.world.leads:
            self._told = self.store.add("lost", 0) or None

    def look(self) -> int | None:
        """Who is lost, if somebody is."""
        for rank in self.watched:
            still = self.heard[rank] == self._seen[rank] and self.heard[rank] < GONE
            self._silent[rank] = self._silent[rank] + 1 if still else 0
            self._seen[rank] = self.heard[rank]
        lost = next((rank for rank in self.watched if self._silent[rank] >= PATIENCE), None)
        return self._told if lost is None else lost

    def tell(self, lost: int) -> None:
        """The others, where this is who must."""
        if self.world.leads:
            with suppress(RuntimeError):
                self.store.add("lost", lost)

    def leave(self) -> None:
        """In good order."""
        self.store.add(str(self.world.rank), GONE)


@contextmanager
def kept(world: World) -> Iterator[None]:
    """Look out for the other processes, and end this one when one of them is lost."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    made: Any = dist  # whose types leave stores out
    store = made.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives an attempt
    lookout = Lookout(world, made.PrefixStore(f"mssar/{again}", store))
    over = threading.Event()

    def talk() -> None:
        with suppress(RuntimeError):  # the store is gone, and who kept it: that will be seen
            while not over.wait(PAUSE):
                lookout.talk()

    def look() -> None:
        while not over.wait(PAUSE):
            lost = lookout.look()
            if lost is not None:
                _end(lookout, lost)

    workers = [threading.Thread(target=work, daemon=True) for work in (talk, look)]
    for worker in workers:
        worker.start()
    try:
        yield
        with suppress(RuntimeError):  # nobody to tell
            lookout.leave()
    finally:
        over.set()
        for worker in workers:  # who is still in the store when Python ends has it abort
            worker.join(2 * PAUSE)


def _end(lookout: Lookout, lost: int) -> None:
    # The main thread waits for the lost one in a call that no exception ends.
    world = lookout.world
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # that a progress bar had hidden
    said = f"mssar: process {world.rank} of {world.size}: nothing was heard of process {lost} for "
    print(f"{cursor}{said}{PAUSE * PATIENCE:.0f} s; {KEPT}", file=sys.stderr, flush=True)
    teller = threading.Thread(target=lookout.tell, args=(lost,), daemon=True)
    teller.start()  # beside this, since the store may not answer
    teller.join(2 * PAUSE)
    if world.leads:
        time.sleep(2 * PAUSE)  # it may keep the store in which the others read this
    os._exit(1)
