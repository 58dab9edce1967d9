"""One worker of `warmroute router --workers N`: a whole router, told on stdin by `workers` what to be.

The end of stdin is the end of whoever started it, and so of this.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from router.program import serve
from router.siblings import Siblings
from router.workers import Assignment
from shared.supervisor import die_with_parent


def main() -> int:
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    die_with_parent()
    return serve(assignment.settings, Siblings(Path(assignment.folder), assignment.number, assignment.count))


if __name__ == "__main__":
    raise SystemExit(main())
