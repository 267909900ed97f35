"""A real Slurm on hosts that are network namespaces: munged, slurmctld, a slurmd on each compute host.

Owns   the daemons' folder and configuration; the daemons live in the lab's hosts, and end with them.
Takes  a lab: its last host is the controller's, where jobs are submitted; the others compute.
Gives  the clients' commands, jobs' states, and what a job has printed.
Invariant: nothing of the system's own Slurm or munge is read or written.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import netlab
from netlab import Host, Lab, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
START_LIMIT = 60.0
DAEMONS_LIMIT = 1200.0
CREDENTIAL = 5  # seconds: a requeued job starts again no earlier than its credential expires (Slurm's default is 120)

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
InactiveLimit=0
MinJobAge=600
SchedulerParameters=sched_interval=2
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""

# slurmd looks for cgroups even where it is told to use none.
CGROUPS = "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"


def cannot_run() -> str | None:
    """Why this machine cannot run Slurm; None where it can."""
    missing = [program for program in PROGRAMS if find(program) is None]
    if missing:
        return f"needs {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    return None


def find(program: str) -> str | None:
    """Daemons are where a user's PATH need not lead."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


class Slurm:
    """The running cluster; a context manager."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.nodes: Sequence[Host] = lab.hosts[:-1]
        self.controller = lab.hosts[-1]
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path has 108 bytes at most
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> Slurm:
        try:
            self._configure()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.lab.down()  # the daemons first: they write into the folder
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        nodes = [f"NodeName={node.name} NodeAddr={node.address} CPUs=4 State=UNKNOWN" for node in self.nodes]
        text = CONFIGURATION.format(
            controller=self.controller.name,
            address=self.controller.address,
            folder=self.folder,
            credential=CREDENTIAL,
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text(CGROUPS)

    def _start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        places = {
            "--socket": "munge.socket",
            "--log-file": "munged.log",
            "--pid-file": "munged.pid",
            "--seed-file": "munged.seed",
        }
        named = [word for option, name in places.items() for word in (option, str(self.folder / name))]
        self._daemon(self.controller, "munged", "--foreground", "--force", "--key-file", str(key), *named)
        until((self.folder / "munge.socket").exists, START_LIMIT, self.lab.report)
        self._daemon(self.controller, "slurmctld", "-D")
        for node in self.nodes:
            self._daemon(node, "slurmd", "-D", "-N", node.name)
        until(self._ready, START_LIMIT, self.lab.report)

    def _daemon(self, host: Host, program: str, *arguments: str) -> None:
        path = find(program)
        assert path is not None
        # Unlike `ip netns exec` this leaves /sys as it is, where slurmd looks for cgroups.
        script = f'hostname "$0" && mount --bind {netlab.NAMES / host.netns}/hosts /etc/hosts && exec "$@"'
        enter = ["nsenter", f"--net={netlab.MOUNTS / host.netns}", "unshare", "--uts", "--ipc", "--mount", "--"]
        host.start([path, *arguments], self.environment, DAEMONS_LIMIT, [*enter, "sh", "-c", script, host.name])

    def _ready(self) -> bool:
        done = self._run("sinfo", "--noheader", "--partition=all", "--Node", "--format=%T")
        return done.returncode == 0 and done.stdout.split() == ["idle"] * len(self.nodes)

    def _run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.controller.enter(), *command],
            env=netlab.environment({**self.environment, **(env or {})}),
            cwd=cwd or self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def run(self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """A client's command on the controller's host; what it prints."""
        done = self._run(*command, env=env, cwd=cwd)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *options: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> int:
        """A job's number; its output goes to one file, which a requeued job appends to."""
        return int(self.run("sbatch", "--parsable", f"--output={self.folder}/%j.out", *options, env=env, cwd=cwd))

    def output(self, job: int) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says: JobState, ExitCode, Restarts, ..."""
        words = self.run("scontrol", "show", "--oneliner", "job", str(job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: int, *states: str, limit: float) -> dict[str, str]:
        def found() -> dict[str, str] | None:
            shown = self.show(job)
            return shown if shown["JobState"] in states else None

        def what() -> str:
            return f"job {job} in {states}, it is {self.show(job)}\n{self.output(job)[-3000:]}"

        shown = until(found, limit, what)
        assert shown is not None
        return shown

    def wait_for_output(self, job: int, text: str, limit: float, count: int = 1) -> None:
        def what() -> str:
            return f"{text!r} in the output of job {job}, {self.show(job)}\n{self.output(job)[-3000:]}"

        until(lambda: self.output(job).count(text) >= count, limit, what)
