"""Waits until two cores share a cache, as a host may move the cores of a virtual machine apart while it runs.

Between two virtual cores of an AMD EPYC (Zen 4), a cache line's round trip takes 50 to 85 ns if they are on one core
complex, and 330 to 370 ns if they are on two. Then a step of MobileNetV3-small with two threads takes 76 ms instead of
40 (with one thread, always 61), though each large product takes as long as before. It changes several times a minute.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

NEAR = 150.0  # ns of a round trip
PAUSE, LONGEST = 0.5, 120.0  # seconds between tries, and of a wait

# the threads take turns to write one number, each on a core of its own
_SOURCE = """
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
enum { TRIPS = 20000 };
static _Alignas(128) atomic_int turn;
static void stay_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}
static void take_turns(int first) {
  for (int i = first; i < 2 * TRIPS; i += 2) { while (atomic_load(&turn) != i); atomic_store(&turn, i + 1); }
}
static void *other(void *core) { stay_on(*(int *)core); take_turns(1); return 0; }
int main(int count, char **cores) {
  int one = atoi(cores[1]), two = atoi(cores[2]);
  struct timespec begin, end;
  pthread_t thread;
  stay_on(one);
  pthread_create(&thread, 0, other, &two);
  clock_gettime(CLOCK_MONOTONIC, &begin);
  take_turns(0);
  pthread_join(thread, 0);
  clock_gettime(CLOCK_MONOTONIC, &end);
  printf("%f", ((end.tv_sec - begin.tv_sec) * 1e9 + end.tv_nsec - begin.tv_nsec) / TRIPS);
}
"""


@dataclass
class Cores:
    """The first two cores of this process.

    Attributes:
        program: prints the nanoseconds of a round trip; None if it cannot be compiled here.
        waits: whether to wait; False once a wait was in vain, as on a machine whose cores never share a cache.
    """

    program: Path | None
    waits: bool = True

    @classmethod
    def compiled(cls, folder: Path) -> Cores:
        """Compile the program into ``folder``."""
        program = folder / "round_trip"
        (folder / "round_trip.c").write_text(_SOURCE)
        try:
            subprocess.run(["cc", "-O2", "-pthread", "-o", program, f"{program}.c"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            return cls(None)
        return cls(program)

    def are_near(self) -> bool:
        """Whether the cores share a cache now; True if this is unknown."""
        cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]] if self.program else []
        if len(cores) < 2:
            return True
        done = subprocess.run([str(self.program), *cores], capture_output=True, text=True, check=True)
        return float(done.stdout) < NEAR

    def wait(self) -> None:
        """Return when the cores are near, or after ``LONGEST`` seconds."""
        last = time.monotonic() + LONGEST
        while self.waits and not self.are_near():
            self.waits = time.monotonic() < last
            time.sleep(PAUSE)
