"""The limit of open files is raised as far as it may be, and never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from shared.descriptors import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
print(allow_descriptors(int(sys.argv[1])), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("wanted", "limits"), [(100, "100 100 128"), (5000, "128 128 128"), (10, "10 64 128")])
def test_the_limit_is_raised_as_far_as_it_may_be(wanted: int, limits: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(wanted)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == limits
