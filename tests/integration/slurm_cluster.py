"""A throw-away Slurm on this machine: one controller, several nodes, no root, no munge."""

import contextlib
import fcntl
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

DAEMONS = ("slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
_START_S = 120.0
_JOBS_END_S = 20.0
# One of these is the controller's port; those of the nodes come _NODE_PORTS above it.
_BASE_PORTS = range(20000, 29000, 200)
_NODE_PORTS = 100


def missing_programs() -> list[str]:
    """Return the programs of Slurm that this machine lacks."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return [name for name in (*DAEMONS, *CLIENTS) if shutil.which(name, path=path) is None]


def build_pyxis_stand_in(folder: Path) -> Path | None:
    """Compile the stand-in for pyxis; None without a compiler or Slurm's header."""
    if shutil.which("gcc") is None or not Path("/usr/include/slurm/spank.h").is_file():
        return None
    plugin = folder / "pyxis_stand_in.so"
    source = Path(__file__).with_name("pyxis_stand_in.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", str(plugin), str(source)]
    subprocess.run(command, check=True, timeout=60)
    return plugin


class _Ports:
    """Ports that no other cluster of this machine takes as long as this object is open.

    Two clusters with the same ports would be one: whoever comes second reaches the first's
    controller, and their jobs run on each other's nodes.
    """

    def __init__(self, nodes: int) -> None:
        for base in random.sample(_BASE_PORTS, len(_BASE_PORTS)):
            path = Path(tempfile.gettempdir(), f"slurm-ports-{base}.lock")
            self._lock = os.open(path, os.O_CREAT | os.O_RDWR)
            wanted = [base, *range(base + _NODE_PORTS, base + _NODE_PORTS + nodes)]
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if all(map(_is_free, wanted)):
                    self.base = base
                    return
            os.close(self._lock)
        raise AssertionError("no free ports for Slurm's daemons")

    def close(self) -> None:
        os.close(self._lock)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


class SlurmCluster:
    """Starts and stops the daemons; `environment` reaches it."""

    def __init__(self, folder: Path, *, nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        self._ports = _Ports(nodes)
        self.has_pyxis = False
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin",
        }

    def start(self) -> None:
        for name in ("state", "log", *(f"spool-{n}" for n in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        for node in self.nodes:
            (self.folder / f"tmp-{node}").mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration())
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        plugin = build_pyxis_stand_in(self.folder)
        (self.folder / "plugstack.conf").write_text(f"required {plugin}\n" if plugin else "")
        self.has_pyxis = plugin is not None
        conf = str(self.folder / "slurm.conf")
        self.run("slurmctld", "-c", "-f", conf)
        for node in self.nodes:
            self.start_node(node)
        deadline = time.monotonic() + _START_S
        while self.run("sinfo", "-h", "-o", "%T", check=False).split() != ["idle"]:
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def start_node(self, node: str) -> None:
        self.run("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node)

    def kill_node(self, node: str) -> None:
        """End a node without warning: its daemon, and everything that its jobs run.

        The controller alone would notice late.
        """
        pid_file = self.folder / f"slurmd-{node}.pid"
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
        pid_file.unlink()  # a killed daemon leaves it
        tasks = self._processes_of(node)
        # Their keepers first, which would report an orderly end to the controller.
        keepers = {parent for pid in tasks if _name(parent := _parent(pid)) == "slurmstepd"}
        for pid in (*keepers, *tasks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def _processes_of(self, node: str) -> list[int]:
        """Return the processes of this cluster's jobs that say they run on a node."""
        wanted = {f"SLURM_CONF={self.folder}/slurm.conf", f"SLURMD_NODENAME={node}"}
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                if wanted <= set(words):
                    found.append(int(entry.name))
        return found

    def stop(self) -> None:
        self.run("scancel", "--full", "-u", getpass.getuser(), check=False)
        deadline = time.monotonic() + _JOBS_END_S  # a step outlives the daemon that started it
        while self.run("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        pid_files = list(self.folder.glob("*.pid"))
        for signum in (signal.SIGTERM, signal.SIGKILL):
            for path in pid_files:
                with contextlib.suppress(OSError, ValueError):
                    os.kill(int(path.read_text()), signum)
            deadline = time.monotonic() + 10
            while any(path.exists() for path in pid_files) and time.monotonic() < deadline:
                time.sleep(0.1)
        self._ports.close()

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in (self.folder / "log").iterdir())

    def _configuration(self) -> str:
        user, port, folder = getpass.getuser(), self._ports.base, self.folder
        first, last = port + _NODE_PORTS, port + _NODE_PORTS + len(self.nodes) - 1
        lines = {
            "ClusterName": "throwaway",
            "SlurmctldHost": "localhost",
            "SlurmctldPort": port,
            "SlurmUser": user,
            "SlurmdUser": user,
            "AuthType": "auth/none",
            "CredType": "cred/none",
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "ReturnToService": 2,
            "MailProg": "/bin/true",
            "KillWait": 2,
            # Daemons of a busy machine may be silent for long; kill_node says what is lost.
            "SlurmdTimeout": 60,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "GresTypes": "gpu",
            "PlugStackConfig": f"{folder}/plugstack.conf",
            "MinJobAge": 600,
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool-%n",
            # One per node: PMIx makes a folder of the same name in each.
            "TmpFS": f"{folder}/tmp-%n",
            "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
            "SlurmdLogFile": f"{folder}/log/slurmd-%n.log",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=1,bf_interval=1,batch_sched_delay=0",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            # The machine has fewer processors than the nodes announce.
            "SlurmdParameters": "config_overrides",
            "JobCompType": "jobcomp/filetxt",
            "JobCompLoc": f"{folder}/log/jobcomp.txt",
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        return text + (
            f"NodeName=n[1-{len(self.nodes)}] NodeHostname=localhost Port=[{first}-{last}] CPUs=16 "
            "Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:8 "
            "State=UNKNOWN\n"
            "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1\n"
            "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10\n"
        )


def _parent(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
