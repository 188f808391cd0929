"""The ``mssar`` command: its verbs, and how a mistake is answered."""

from __future__ import annotations

import errno
import inspect
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import mssar
from mssar.lab.commands.bench import bench
from mssar.lab.commands.compare import compare
from mssar.lab.commands.cost import cost
from mssar.lab.commands.data import app as data
from mssar.lab.commands.demo import demo
from mssar.lab.commands.evaluate import evaluate
from mssar.lab.commands.explain import explain
from mssar.lab.commands.export import export
from mssar.lab.commands.report import report
from mssar.lab.commands.reproduce import reproduce
from mssar.lab.commands.task import task
from mssar.lab.commands.train import train
from mssar.lab.commands.weights import weights
from mssar.lab.engine import clock, memory


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # typer would say nothing
        print("mssar: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None


class _Verbs(TyperGroup):
    def make_context(self, *args: Any, **options: Any) -> Any:
        with _interruptible():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _interruptible():
            return super().invoke(ctx)


def _flowing(words: str) -> str:
    """A help text that fits any width. Typer keeps the lines of all paragraphs but the first; here
    only examples do, which begin with a \\b."""
    asis = "" if getattr(typer.core, "HAS_RICH", True) else "\b\n"  # click asks for the sign
    return "\n\n".join(
        asis + one.removeprefix("\b\n") if one.startswith("\b") else one.replace("\n", " ")
        for one in words.split("\n\n")
    )


app = typer.Typer(
    name="mssar",
    cls=_Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.add_typer(data, name="data")
app.command()(train)
app.command("eval")(evaluate)
app.command()(weights)
app.command()(explain)
app.command()(export)
app.command()(reproduce)
app.command()(compare)
app.command()(report)
app.command()(cost)
app.command()(bench)
app.command(hidden=True)(task)  # for Slurm and `--submit local` to start
for verb in (*app.registered_commands, *data.registered_commands):
    verb.help = _flowing(inspect.getdoc(verb.callback) or "")


def _version(wanted: bool) -> None:
    if wanted:
        import torch

        print(f"mssar {mssar.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def command(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001, its callback answers
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Multi-scale spatially-asymmetric recalibration for image classifiers."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _drop_output() -> None:
    """What standard output does not take, so that the interpreter does not try again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(begun: float | None = None) -> None:
    """Run the command; a user's mistake is one line and exit status 2, a machine's one and 1.

    ``begun``: when its process did, by the monotonic clock, from which a time budget counts.
    """
    clock.begun = begun
    if isinstance(sys.stdout, io.TextIOWrapper):  # … and ± are not in every encoding
        sys.stdout.reconfigure(errors="replace")
    try:
        status = app(prog_name="mssar", standalone_mode=False)
        sys.stdout.flush()  # else the interpreter would find out at its end that it cannot
    except OSError as trouble:  # a full disk, a folder that may not be written
        where = f": {trouble.filename}" if trouble.filename else ""
        full = trouble.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        kept = "; what was saved before is kept" if full else ""
        print(f"mssar: {trouble.strerror or trouble}{where}{kept}", file=sys.stderr)
        _drop_output()
        sys.exit(1)
    except KeyboardInterrupt:
        print("mssar: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as mistake:
        if (lacking := memory.lacking(mistake)) is not None:
            print(f"mssar: {lacking}; {memory.ADVICE}", file=sys.stderr)
            sys.exit(1)
        usage = getattr(mistake, "format_message", None)  # of the parser's own exceptions
        if usage is None and not isinstance(mistake, ValueError):
            raise
        said = usage() if usage else str(mistake)
        if said:  # a verb that lacks its own has shown its help
            print(f"mssar: {said}", file=sys.stderr)
        sys.exit(2)
    finally:
        clock.begun = None
    sys.exit(status)
