"""Launch the ranks of a run on this machine, with the mpiexec of the MPI that mpi4py uses."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gradgraph.errors import ParallelError, RuntimeUnavailableError
from gradgraph.machine.processes import in_foreground, program, python_command
from gradgraph.parallel.mpi import RANKS, library

# output of launchers that users need not see: forwarded signals and the regular end of jobs
_SAID_BY_LAUNCHERS = re.compile(
    r"\[mpiexec@|Abort\(\d+\) on node|={20,}|=   |YOUR APPLICATION TERMINATED|This typically refers|Please see the FAQ|"
    r"\s*$"
)
_BY_SIGNAL = range(128, 160)
STOPPED = (130, 143)  # exit codes of runs stopped by Ctrl-C and SIGTERM


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``gradgraph`` with these arguments in ``ranks`` processes; return the exit code of the run.

    Raises:
        RuntimeUnavailableError: if mpi4py or mpiexec is missing.
        ParallelError: if a process was killed.
    """
    library(initialize=False)  # raises if something is missing
    own = Path(sys.executable).with_name("mpiexec")  # of this virtual environment
    mpiexec = str(own) if os.access(own, os.X_OK) else program("mpiexec")
    if mpiexec is None:
        raise RuntimeUnavailableError(
            "mpiexec, which starts the ranks, was not found", remedy="pip install mpich (on Windows impi-rt)"
        )
    environment = {RANKS: str(ranks)}
    if hasattr(os, "getuid") and os.getuid() == 0:  # required by Open MPI
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > (os.cpu_count() or 1):  # required by Open MPI 5 and 4; with enough cores they would slow messages down
        environment |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    child = python_command("from gradgraph.cli import main\nmain()", *arguments)
    errors: list[str] = []  # printed by the ranks

    def shows(line: str) -> bool:
        errors.extend([line] if line.startswith("error: ") else [])
        return _SAID_BY_LAUNCHERS.match(line) is None

    code = in_foreground([mpiexec, "-n", str(ranks), *child], shows, **environment)
    if code in STOPPED or 0 <= code <= 2 or errors:
        return code if code in (*STOPPED, *range(3)) else 1
    number = -code if code < 0 else code - 128 if code in _BY_SIGNAL else code
    raise ParallelError(
        f"one of the {ranks} ranks was killed from outside (signal or exit code {number}), which ended all of them",
        remedy="if memory ran out, start fewer ranks or use smaller batches",
    )
