"""Launching by CUDA's driver, against a library in C that keeps what it is given."""

import ctypes
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mssar.kernels import driver
from mssar.kernels.driver import Function
from mssar.kernels.launch import Kernel, Where

SOURCE = Path(__file__).parent / "native" / "cuda.c"
STREAM = 0x7F12_3456_7890


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform == "win32":
        pytest.skip("needs a C compiler")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", SOURCE, "-o", made], check=True)
    found = ctypes.CDLL(str(made))
    found.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    found.stub_config.restype = found.stub_bytes.restype = ctypes.c_void_p
    return found


@pytest.fixture
def cuda(library, monkeypatch):
    monkeypatch.setattr(driver, "_driver", lambda: library)
    return library


def takes(cuda, formats, scratch=2):
    sizes = [struct.calcsize(kind) for kind in formats] + [8] * scratch
    cuda.stub_takes((ctypes.c_size_t * len(sizes))(*sizes), len(sizes))


def made(*, shared=0, **meta):
    meta = {"name": "kernel", "num_warps": 4, "shared": shared, "global_scratch_size": 0} | meta
    return SimpleNamespace(metadata=SimpleNamespace(**meta), asm={"cubin": b"cubin"})


def function(cuda, formats, *, scratch=2, **meta):
    takes(cuda, formats, scratch)
    return Function(0, made(**meta), list(formats))


KINDS = [torch.bfloat16, (torch.float32, torch.int64), (), int, (float, float, float), int, float]
ARGUMENTS = [2**63 + 5, 7, 2**40, -3, 0.5, 0.1, -2.0, 2**31 - 1, 1e-5]


def test_a_launch_is_handed_what_it_was_given(cuda):
    formats = Kernel(object(), KINDS, {}, 4).formats
    assert "".join(formats) == "QQQifffif"
    launch = function(cuda, formats)
    launch(STREAM, (70_000, 3), tuple(ARGUMENTS))
    config = struct.unpack("@7IQQI", ctypes.string_at(cuda.stub_config(), 52))
    assert config == (70_000, 3, 1, 128, 1, 1, 0, STREAM, 0, 0)
    packed = "=" + "".join(formats) + "QQ"
    found = struct.unpack(packed, ctypes.string_at(cuda.stub_bytes(), struct.calcsize(packed)))
    single = struct.unpack("=4f", struct.pack("=4f", 0.5, 0.1, -2.0, 1e-5))
    assert found == (*ARGUMENTS[:4], *single[:3], ARGUMENTS[7], single[3], 0, 0)


def test_a_number_that_does_not_fit_is_an_error(cuda):
    launch = function(cuda, "Qi")
    with pytest.raises(struct.error):
        launch(STREAM, (1, 1), (8, 2**31))
    assert cuda.stub_calls() == 0


def test_threads_do_not_mix_their_arguments(cuda):
    """Packing and launching are two steps; another thread may come between them."""
    launch = function(cuda, "i" * 40)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda i: [launch(1, (1, 1), (i,) * 40) for _ in range(2000)], range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert cuda.stub_calls() == 16_000
    # The two pointers behind the arguments are 0, which all threads but the first differ from.
    assert cuda.stub_mixed() == 2 * 7 * 2000


def test_a_thread_without_a_context_enters_it(cuda):
    launch = function(cuda, "i")
    cuda.stub_leave()
    cuda.stub_fails(driver.NO_CONTEXT, 1)
    launch(STREAM, (1, 1), (5,))
    assert cuda.stub_entered()
    assert cuda.stub_calls() == 2


@pytest.mark.parametrize(("status", "why"), [(1, "invalid argument"), (201, "something else")])
def test_a_launch_that_fails_says_why(cuda, status, why):
    launch = function(cuda, "i")
    cuda.stub_fails(status, 2)
    with pytest.raises(RuntimeError, match=f"^CUDA could not launch kernel: {why}; an earlier"):
        launch(STREAM, (1, 1), (5,))


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_the_pointers_that_triton_appends_are_null(cuda, scratch):
    function(cuda, "QQif", scratch=scratch)(STREAM, (1, 1), (2**40, 7, -3, 0.5))
    packed = "=QQif" + "Q" * scratch
    found = struct.unpack(packed, ctypes.string_at(cuda.stub_bytes(), struct.calcsize(packed)))
    assert found == (2**40, 7, -3, 0.5, *[0] * scratch)


@pytest.mark.parametrize("others", ["", "QQi", "QiQf", "QQiQ"])
def test_a_kernel_that_takes_other_arguments_is_refused(cuda, others):
    takes(cuda, others, scratch=0)
    with pytest.raises(RuntimeError, match=r"takes arguments of .* bytes; it would be given"):
        Function(0, made(), list("QQif"))


def test_no_more_is_asked_of_a_kernel_than_it_has(cuda):
    """Beyond the last argument is an error of the driver's, which compute-sanitizer reports."""
    function(cuda, "QQif", scratch=0)
    assert cuda.stub_beyond() == 0


def test_arguments_after_those_given_are_triton_s_two_pointers():
    given, sizes = list("QQif"), [8, 8, 4, 4]
    for rest in ([], [8], [8, 8]):
        assert driver.misfit(sizes + rest, given) is None
    for rest in ([4], [8, 8, 8]):
        assert driver.misfit(sizes + rest, given)


def test_shared_memory_is_asked_for_where_it_must_be(cuda):
    function(cuda, "i", shared=48 << 10)
    assert cuda.stub_attribute() == 0
    function(cuda, "i", shared=100_000)
    assert cuda.stub_attribute() == 100_000
    with pytest.raises(RuntimeError, match="load kernel, which takes 228 KiB of shared memory"):
        function(cuda, "i", shared=228 << 10)


@pytest.mark.parametrize(
    "meta", [{"global_scratch_size": 16}, {"profile_scratch_size": 8}, {"num_ctas": 2}]
)
def test_kernels_that_need_more_than_arguments_are_refused(cuda, meta):
    with pytest.raises(RuntimeError, match="cannot be launched"):
        function(cuda, "i", **meta)


def test_a_kernel_is_loaded_once_a_device(cuda, monkeypatch):
    takes(cuda, "QQQifffif")
    compiled = []
    kernel = Kernel(object(), KINDS, {}, 4)
    monkeypatch.setattr(Kernel, "compile", lambda _: compiled.append(1) or made())
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    for _ in range(3):
        kernel(Where(0, STREAM), (1, 1), *ARGUMENTS)
    assert (len(compiled), cuda.stub_calls()) == (1, 3)
