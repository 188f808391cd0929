"""``mssar`` and ``python -m mssar``: the command, or one line on how to get it."""

import os
import signal
import sys
import time

from mssar.extras import advice

NEEDED = (
    *("filelock", "jinja2", "msgspec", "numpy", "PIL", "platformdirs"),
    *("rich", "safetensors", "torch", "typer"),
)
SAID = {signal.SIGINT: b"mssar: interrupted\n", signal.SIGTERM: b"mssar: terminated\n"}


def main() -> None:
    begun = time.monotonic()  # to import torch takes seconds
    for number in SAID:
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _stop)  # else someone ignores it
    try:
        from mssar.lab.cli import main as run

        run(begun)
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in NEEDED:
            raise
        sys.exit(f"mssar: the command needs {name}: {advice('lab')}")


def _stop(number: int, _frame: object) -> None:
    """Ctrl-C, or a scheduler's SIGTERM; a training has its own way. In the middle of an import
    there is nothing to save, and at once is best: torch's own would swallow the exception, and go
    on broken."""
    for name, module in list(sys.modules.items()):
        ours = name == "torch" or name.startswith("mssar.")
        if ours and getattr(getattr(module, "__spec__", None), "_initializing", False):
            os.write(2, SAID[signal.Signals(number)])
            os._exit(128 + number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt  # the command says so
    os.write(2, SAID[signal.SIGTERM])
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main()
