"""Runs commands of the program one after the other: python commands.py FILE, a JSON list of them.

Each in a child of this process, which has imported what takes longest.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

from torch import distributed

import quantkit.calibration.runner
import quantkit.jobs.quantize  # noqa: F401
from quantkit.cli.app import app

for number, command in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    child = os.fork()
    if not child:
        if number:  # where torchrun lets its processes meet, they meet once
            place, rank, count = (
                f"file://{sys.argv[1]}.{number}",
                int(os.environ["RANK"]),
                int(os.environ["WORLD_SIZE"]),
            )
            meet = partial(distributed.init_process_group, init_method=place, rank=rank, world_size=count)
            distributed.init_process_group = meet
        app(command, prog_name="quantkit")
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
