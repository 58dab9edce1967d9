"""The command line: one subcommand per job, each a thin call into a package."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> int:
    sys.stderr.write("warmroute: the commands are on their way\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
