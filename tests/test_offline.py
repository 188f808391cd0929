"""Nothing asks the network without being told to: a child process in which to ask is an error.

The guard is one of Python's audit hooks, which code in C cannot go around and nothing takes off.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src"

GUARD = """
import sys

ASKED = []
WAYS = (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr",
    "socket.getnameinfo", "socket.sendto", "socket.sendmsg", "socket.bind",
)

def guard(event, arguments):
    if event in WAYS:
        if len(arguments) > 1 and isinstance(arguments[1], (str, bytes)) and event.endswith(
            ("connect", "bind", "sendto", "sendmsg")
        ):
            return  # a file's name: between processes of this machine
        ASKED.append((event, arguments[1:]))
        raise RuntimeError(f"asked the network: {event} {arguments[1:]}")
    if event == "subprocess.Popen" and not str(arguments[0]).endswith("git"):
        ASKED.append((event, arguments[:2]))

sys.addaudithook(guard)
"""

LIBRARY = """
import importlib, pkgutil
import mssar

for name in mssar.__all__:
    getattr(mssar, name)
for found in pkgutil.walk_packages(mssar.__path__, "mssar."):
    # What needs packages that are not here, and what would run.
    if not found.name.startswith(("mssar.kernels.triton", "mssar.timm", "mssar.surgery.t")):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
import torch

model = mssar.create_model("resnet8", "mssar")
model.save_pretrained("net")
mssar.from_pretrained("net")(torch.zeros(1, 3, 32, 32)).sum().backward()
mssar.create_model("resnet8", "mssar", weights="net/model.safetensors")
mssar.insert(mssar.create_model("resnet8"))
mssar.cost(model, (3, 32, 32))
mssar.list_models()
"""

COMMANDS = """
import glob
from lab import arrays
from mssar.lab import cli, data

data.load = lambda *_: arrays(37, 24, 10)

def run(words, status=0):
    sys.argv = ["mssar", *words.split()]
    try:
        cli.main()
    except SystemExit as stop:
        assert (stop.code or 0) == status, (words, stop.code)

verbs = "demo data train eval weights explain export reproduce compare report cost bench"
for verb in ("", *verbs.split(), "data get", "data check"):
    run(f"{verb} --help")
run("--version")
run("nonsense", 2)
train = "train resnet8 --dataset cifar10 --recalibration mssar --epochs 1 --batch 16 --padding 1"
run(train)
run(f"{train} --resume")
(folder,) = glob.glob("runs/cifar10-*")
run(f"eval {folder}")
run(f"weights {folder} x.safetensors")
run("explain x.safetensors test:0")
run("report runs")
run("cost resnet8 --recalibration mssar")
run("bench resnet8 --recalibration none --what inference --seconds 0.05 --batch 2")
run(f"export {folder} x.pt2 --format torch")
"""

END = """
assert ASKED == [], ASKED
print("quiet")
"""


def guarded(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (SOURCE, TESTS)))
    return subprocess.run(
        [sys.executable, "-c", GUARD + program + END],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("program", [LIBRARY, COMMANDS], ids=["library", "commands"])
def test_the_network_is_not_asked(program, tmp_path):
    done = guarded(program, tmp_path)
    assert done.stdout.endswith("quiet\n"), done.stderr[-3000:]


@pytest.mark.parametrize(
    "asks",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import socket as s; s.socket(s.AF_INET, s.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "from mssar.lab.data import fetch\nfetch.PAUSES = ()\nfetch.get('cifar100')",
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_the_guard_would_tell(asks, tmp_path):
    program = f"try:\n  exec({asks!r})\nexcept Exception as error:\n  pass\n"
    done = guarded(f"import os\nos.environ['MSSAR_DATA'] = 'data'\n{program}", tmp_path)
    assert "AssertionError: [('s" in done.stderr, done.stderr
