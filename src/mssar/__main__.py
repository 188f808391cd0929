"""``mssar`` and ``python -m mssar``: the command, or one line on how to get it."""

import os
import signal
import sys

from mssar.extras import advice

NEEDED = ("filelock", "numpy", "PIL", "platformdirs", "rich", "safetensors", "torch", "typer")


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else someone ignores it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        from mssar.lab.cli import main as run

        run()
    except ModuleNotFoundError as missing:
        name = (missing.name or "").partition(".")[0]
        if name not in NEEDED:
            raise
        sys.exit(f"mssar: the command needs {name}: {advice('lab')}")


def _interrupt(_signal: int, _frame: object) -> None:
    """Ctrl-C. In the middle of an import there is nothing to save, and at once is best: torch's
    own would swallow the exception, and go on broken."""
    for name, module in list(sys.modules.items()):
        ours = name == "torch" or name.startswith("mssar.")
        if ours and getattr(getattr(module, "__spec__", None), "_initializing", False):
            os.write(2, b"mssar: interrupted\n")
            os._exit(130)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
