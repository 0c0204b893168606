"""examples/clusters: what people copy is valid where it goes, and asks gradgraph for nothing that it does not have."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest

from gradgraph.cli.app import cli

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "clusters"
FILES = sorted(path for path in RECIPES.iterdir() if path.is_file())
SCRIPTS = [path for path in FILES if path.suffix == ".sh"]

# what the schema of kubeflow.org/v2beta1 knows of a spec, and the values that it takes
SPEC = {"launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "mpiReplicaSpecs": None, "runLauncherAsWorker": None, "runPolicy": None, "slotsPerWorker": None,
        "sshAuthMountPath": None}  # fmt: skip
POLICY = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend",
          "ttlSecondsAfterFinished"}  # fmt: skip


def commands(path: Path) -> list[list[str]]:
    """The words of each call of gradgraph, without what the shell puts in."""
    text = path.read_text("utf-8").replace("\\\n", " ")
    if path.suffix == ".yaml":
        text = re.sub(r"\n\s+(?=--)", " ", text)
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    found = [re.search(r"\bgradgraph (\w+ .*)", re.sub(r"\$\(.*?\)", "", line)) for line in lines]
    return [shlex.split(match[1]) for match in found if match and "bin/" not in match[0]]


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix != ".txt"], ids=lambda p: p.name)
def test_flags_are_those_of_the_command(path: Path) -> None:
    calls = commands(path)
    assert calls, "it calls gradgraph"
    for name, *words in calls:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        known = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        flags = [word for word in words if word.startswith("--")]
        assert len(flags) > 3
        assert set(flags) <= known


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_scripts_are_shell(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_slurm_reads_its_lines_before_the_first_command() -> None:
    lines = (RECIPES / "slurm.sh").read_text("utf-8").splitlines()
    asked = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert asked and max(asked) < first
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", lines[i]) for i in asked)


def test_hosts_are_as_mpich_reads_them() -> None:
    lines = [line for line in (RECIPES / "hosts.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    assert all(re.fullmatch(r"[\w.-]+:[1-9]\d*", line) for line in lines)


def test_mpich_takes_the_hosts_and_the_flags(tmp_path: Path) -> None:
    """The command of laptops.sh, with this machine as both laptops, and another program in gradgraph's place."""
    pytest.importorskip("mpi4py", reason="mpiexec comes with the extra mpi")
    beside = ROOT / ".venv" / "bin"
    if not (beside / "mpiexec").exists():
        pytest.skip("there is no mpiexec of the mpich wheel in .venv")
    (tmp_path / "hosts.txt").write_text("localhost:1\nlocalhost:1\n")
    stand_in = tmp_path / "gradgraph"
    stand_in.write_text('#!/bin/sh\necho "$PMI_RANK of $PMI_SIZE, $OMP_NUM_THREADS threads: $*"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{beside}:/usr/bin:/bin", "HOSTS": str(tmp_path / "hosts.txt"),
                   "OMP_NUM_THREADS": "3"}  # fmt: skip
    said = subprocess.run(
        ["bash", str(RECIPES / "laptops.sh")], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    words = "train model.onnx --data train.npz"
    assert sorted(line[: line.index(" --run")] for line in said.stdout.splitlines()) == [
        f"0 of 2, 3 threads: {words}",
        f"1 of 2, 3 threads: {words}",
    ]


def test_the_job_is_one_of_the_operator() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    job: dict[str, Any] = yaml.safe_load((RECIPES / "mpijob.yaml").read_text("utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert job["metadata"]["name"]
    spec = job["spec"]
    assert set(spec) <= set(SPEC)
    assert all(spec[name] in values for name, values in SPEC.items() if values and name in spec)
    assert set(spec["runPolicy"]) <= POLICY
    replicas = spec["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    assert replicas["Launcher"]["replicas"] == 1
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["name"] and container["image"]
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    ranks = re.search(r"mpiexec -n (\d+)", str(replicas["Launcher"]))
    assert ranks and int(ranks[1]) == replicas["Worker"]["replicas"] * spec["slotsPerWorker"]


def test_the_page_leads_to_each_of_them() -> None:
    page = (ROOT / "docs" / "how-to" / "many-machines.md").read_text("utf-8")
    assert [path.name for path in FILES if f"(../../examples/clusters/{path.name})" not in page] == []
