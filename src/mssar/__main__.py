"""``mssar`` and ``python -m mssar``: the command, or one line on how to get it."""

import sys

from mssar.extras import advice


def main() -> None:
    try:
        from mssar.lab.cli import main as run
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.exit(f"mssar: the command needs {missing.name}: {advice('lab')}")
    run()


if __name__ == "__main__":
    main()
