"""Run a rank of the doctor with a fault: the arguments are its kind, then the doctor's options."""

import os
import re
import sys
import time

import torch.distributed as dist

from epfsdp2.engine.fsdp.unit import Unit
from epfsdp2.recipes.doctor import cli
from epfsdp2.recipes.doctor.check import Check, Row


def sleeps(ranks):
    ranks.note("a nap")
    if ranks.rank == 1:
        time.sleep(600)
    if ranks.rank == 2:
        raise RuntimeError("no such cable")
    dist.barrier()


def spins(ranks):
    if ranks.rank == 1:
        re.match("(a+)+$", 40 * "a" + "b")  # holds the GIL for days
    dist.barrier()


def raises(ranks):
    if ranks.rank == 1:
        raise RuntimeError("no such cable")


def main() -> int:
    kind, *words = sys.argv[1:]
    if kind == "raises":  # on two nodes
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % 2)
        Unit.divide_factor = lambda self, topology: self.ranks(topology)  # FSDP's default
    measure = {"sleeps": sleeps, "spins": spins, "raises": raises}[kind]
    cli.CHECKS = {kind: Check(4.0, measure, lambda found, ranks: [Row(kind, "done")]), **cli.CHECKS}
    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
