from __future__ import annotations

import os

from shared.local_cluster import replica_program
from shared.settings import ReplicaSettings, UpSettings, parse


def test_what_up_is_told_of_its_replicas_reaches_each_of_them() -> None:
    told = UpSettings(replicas=3, engine="sim", model="tiny", blocks=500, host_blocks=70, block_size=32, threads=1)
    program = replica_program(told, 2, "redis://127.0.0.1:1")

    command, *flags = program.arguments
    replica = parse(ReplicaSettings, flags, os.environ, "warmroute replica")
    assert command == "replica"
    assert (replica.id, replica.engine, replica.blocks, replica.host_blocks) == ("replica-2", "sim", 500, 70)
    assert (replica.block_size, replica.threads) == (32, 1)
