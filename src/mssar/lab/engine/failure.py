"""Why one run could not go on, in a line; the others do."""

from __future__ import annotations

import errno
import os
import traceback
from contextlib import suppress
from pathlib import Path

from mssar.durable import write_whole
from mssar.lab.engine import checkpoint, memory
from mssar.lab.run import Run

NAME = "failure.txt"  # in the run's folder: where in the program it was
# That one folder answers with; a full disk answers so to everybody.
_REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    errno.ENAMETOOLONG,
)


class DivergedError(RuntimeError):
    """A number that is not finite: the run cannot go on. It says all there is to say."""

    def __init__(self, what: str, run: Run, directory: Path) -> None:
        self.what = what
        super().__init__(f"{run}: {what}{kept(run, directory)}; try a lower --lr")


def reason(error: Exception, run: Run, directory: Path) -> str:
    """What to tell the user: which run, what happened, what is left of it, what to do."""
    if isinstance(error, DivergedError):
        return str(error)
    what, advice = " ".join(str(error).split()) or type(error).__name__, ""
    if (lacking := memory.lacking(error)) is not None:
        what, advice = lacking, f"; {memory.ADVICE}"
    elif isinstance(error, OSError):
        what = f"{error.strerror}: {error.filename}"
    elif not isinstance(error, ValueError):  # nobody's mistake but the program's
        what = f"{type(error).__name__}: {what:.300}"
        with suppress(OSError):  # a disk that is full says so soon enough
            write_whole(directory / NAME, "".join(traceback.format_exception(error)).encode())
            advice = f"; {directory / NAME} says where"
    if isinstance(error, checkpoint.InUseError):  # what is there is the other's
        return f"{run}: {what}"
    return f"{run}: {what}{kept(run, directory)}{advice}"


def reason_of_several(error: Exception) -> str:
    """Why runs that were one are so no longer."""
    if isinstance(error, DivergedError):
        # What is not finite in one network is soon in all: nobody knows whose it was.
        return f"of one or more of them {error.what}"
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def is_everybodys(error: Exception, *directories: Path) -> bool:
    """Whether an error of the disk is of more than these runs' own folders."""
    if not isinstance(error, OSError):
        return False
    if error.errno not in _REFUSALS or error.filename is None:
        return True
    place = Path(os.fsdecode(error.filename))
    own = next((d for d in directories if d == place or d in place.parents), None)
    # What cannot be made is refused by the folder of all runs, unless it is for its name.
    return own is None or not (os.path.lexists(own) or error.errno == errno.ENAMETOOLONG)


def kept(run: Run, directory: Path) -> str:
    """What there is to go on from: of this run, and whole. Nothing is said of other files there."""
    paths = checkpoint.checkpoints(directory)
    for path in reversed(paths):
        with suppress(ValueError, OSError):
            if checkpoint.load(path)[0].run == run.as_dict():
                return f"; {path} is the last good checkpoint"
    return "" if paths else "; nothing was saved yet"
