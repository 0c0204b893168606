"""Starting the ranks of a run on this machine, by the mpiexec of the MPI that mpi4py uses."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gradgraph.errors import ParallelError, RuntimeUnavailableError
from gradgraph.machine.processes import in_foreground, program, python_command
from gradgraph.parallel.mpi import RANKS, library

# what launchers say besides: of signals that they hand on, and of a job that ended as it should end
_SAID_BY_LAUNCHERS = re.compile(
    r"\[mpiexec@|Abort\(\d+\) on node|={20,}|=   |YOUR APPLICATION TERMINATED|This typically refers|Please see the FAQ|"
    r"\s*$"
)
_BY_SIGNAL = range(128, 160)
STOPPED = (130, 143)  # the exit codes of runs that were stopped by Ctrl-C and SIGTERM


def launch(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``gradgraph`` with these arguments in so many processes; returns the exit code of the run.

    Raises:
        RuntimeUnavailableError: mpi4py or mpiexec is not there.
        ParallelError: a process was killed.
    """
    library(initialize=False)  # which says what is missing
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if os.access(beside, os.X_OK) else program("mpiexec")
    if mpiexec is None:
        raise RuntimeUnavailableError(
            "there is no mpiexec, which starts the ranks", remedy="pip install mpich (on Windows impi-rt)"
        )
    environment = {RANKS: str(ranks)}
    if hasattr(os, "getuid") and os.getuid() == 0:  # Open MPI asks for these
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks > (os.cpu_count() or 1):  # Open MPI 5 and 4 ask for these; with cores enough they would slow messages down
        environment |= {
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    child = python_command("from gradgraph.cli import main\nmain()", *arguments)
    told: list[str] = []  # the errors of ranks

    def shows(line: str) -> bool:
        told.extend([line] if line.startswith("error: ") else [])
        return _SAID_BY_LAUNCHERS.match(line) is None

    code = in_foreground([mpiexec, "-n", str(ranks), *child], shows, **environment)
    if code in STOPPED or 0 <= code <= 2 or told:
        return code if code in (*STOPPED, *range(3)) else 1
    number = -code if code < 0 else code - 128 if code in _BY_SIGNAL else code
    raise ParallelError(
        f"a process of the {ranks} was ended from outside (signal or exit code {number}), and so were all",
        remedy="if memory ran out, start fewer ranks or take smaller batches",
    )
