"""A Slurm of the tests' own: a controller and two nodes on this machine, without accounting."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

NODES = ("a", "b")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPidFile={folder}/controller.pid
SlurmctldLogFile={folder}/controller.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
NodeName=a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=a,b Default=YES MaxTime=INFINITE
"""


@dataclass
class Slurm:
    """Daemons, each by the name of its node."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        configuration = str(self.folder / "slurm.conf")
        self._start("controller", "slurmctld", "-D", "-c", "-f", configuration)
        for node in NODES:
            self._start(node, "slurmd", "-D", "-f", configuration, "-N", node)
        until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", self.logs)

    def _start(self, name: str, *words: str) -> None:
        # In a session of its own: of what is killed only its own processes may be hit.
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        self.daemons[name] = subprocess.Popen(
            words, stderr=subprocess.DEVNULL, start_new_session=True, **quiet
        )

    def ask(self, *words: str) -> str:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def kill(self, node: str) -> None:
        """As if its power was cut: the daemon, and all that it started. The controller is told,
        rather than waited for until it finds out."""
        daemon = self.daemons.pop(node)
        daemon.kill()
        daemon.wait()
        for process in self._processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def hasten(self) -> None:
        """What was queued again waits for two minutes, by default; not here."""
        for line in self.ask("squeue", "-h", "-r", "-t", "pending", "-o", "%i %r").splitlines():
            job, reason = line.split()
            if reason == "BeginTime":
                self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def _processes(self, node: str) -> list[int]:
        """What a job runs there, and the daemons of its steps, which are their parents."""
        mark, own = f"SLURMD_NODENAME={node}\0".encode(), f"SLURM_CONF={self.folder}".encode()
        found = set[int]()
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                around = (place / "environ").read_bytes()
                if mark in around and own in around:
                    found.add(int(place.name))
                    parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                    if b"slurmstepd" in Path(f"/proc/{parent}/cmdline").read_bytes():
                        found.add(parent)
        return sorted(found)

    def logs(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text('utf-8', 'replace')[-3000:]}" for log in logs)

    def stop(self) -> None:
        """At once: nothing of it is needed any more."""
        for node in NODES:
            for process in self._processes(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        for daemon in self.daemons.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()


def until(true: Callable[[], bool], said: Callable[[], str] = str, seconds: float = 240) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, said()
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        found = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """Two nodes that are up, and the commands' environment set to find them."""
    lack = pytest.fail if os.environ.get("MSSAR_SLURM") == "required" else pytest.skip
    for command in ("slurmctld", "slurmd", "sbatch", "srun"):
        if shutil.which(command) is None:
            lack(f"there is no {command}: tools/slurm installs Debian's")
    if os.geteuid() != 0:
        lack("the daemons are root's")
    pytest.importorskip("submitit")
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        for name in ("state", *NODES):
            (folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(host=host, ports=free_ports(3), folder=folder)
        (folder / "slurm.conf").write_text(text)
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        made = Slurm(folder)
        try:
            made.start()
            yield made
        finally:
            made.stop()
