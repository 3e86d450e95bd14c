"""The start of the `journeywork` command, also as `python -m pipeline`: says what to install where only the SDK is
installed. The SDK's own commands run there too."""

from __future__ import annotations

import sys

from pipeline.commands.modules import SDK, run_module


def main() -> None:
    """Run `pipeline.commands.main`. Exits with 2 and one line where a package that the command needs is missing."""
    if sys.argv[1:2] and sys.argv[1] in SDK:
        run_module(SDK[sys.argv[1]][0], sys.argv[2:])
    try:
        from pipeline.commands import main as cli
    except ModuleNotFoundError as missing:
        sys.stderr.write(
            f"journeywork: the package {missing.name} is not installed: this is the SDK for agent code alone. "
            "The command needs the services: `deploy/make-venv.sh cpu` of the repository installs them, or `gpu` on "
            "a machine with a GPU.\n"
        )
        raise SystemExit(2) from None
    cli.main()


if __name__ == "__main__":
    main()
