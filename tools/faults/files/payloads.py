"""Pickles that harm those who believe them."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Payload:
    """What a pickle does to those who believe it."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.args


def payloads(touched: Path) -> dict[str, Callable[[], bytes]]:
    """Pickles that write a file, or that fill the memory."""
    path = str(touched).encode()

    def calling(module: str, name: str, *args: bytes) -> bytes:
        given = b"".join(b"X" + struct.pack("<I", len(a)) + a for a in args)
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + given + b"tR."

    touch = b"touch " + path
    code = b"open(" + repr(str(touched)).encode() + b",'w')"
    found: dict[str, Callable[[], bytes]] = {
        f"calls {module}.{name}": lambda module=module, name=name, args=args: calling(
            module, name, *args
        )
        for module, name, args in (
            ("os", "system", (touch,)), ("posix", "system", (touch,)), ("nt", "system", (touch,)),
            ("subprocess", "getoutput", (touch,)), ("builtins", "exec", (code,)),
            ("builtins", "eval", (code,)), ("__builtin__", "eval", (code,)),
            ("builtins", "open", (path, b"w")), ("io", "open", (path, b"w")),
            ("pathlib", "Path.touch", (path,)), ("numpy", "fromfile", (path,)),
            ("numpy.testing._private.utils", "runstring", (code, b"")),
            ("numpy.core.multiarray", "scalar", (path,)), ("torch", "load", (path,)),
            ("_codecs", "lookup", (b"latin1",)), ("_codecs", "encode", (b"a", b"zip")),
            ("importlib", "import_module", (b"antigravity",)), ("timeit", "timeit", (code,)),
            ("numpy", "dtype.__class__", (b"u1",)), ("numpy", "ndarray", (b"1",)),
        )
    }  # fmt: skip
    import os

    for protocol in range(6):
        found[f"os.system, protocol {protocol}"] = lambda protocol=protocol: pickle.dumps(
            {"data": Payload(os.system, touch.decode())}, protocol
        )
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR"
    found |= {
        "an array without its bytes": lambda: b"\x80\x02}U\x04data" + array + b"s.",
        "an array of objects": lambda: b"\x80\x02cnumpy\ndtype\n(U\x02O8K\x00K\x01tR.",
        "an array of 10^18 bytes": lambda: b"\x80\x02"
        + array + b"(K\x01(\x8a\x08" + struct.pack("<q", 10**18) + b"t" + dtype + b"\x89U\x00tb.",
        "a place for a thousand million": lambda: b"\x80\x02Nr" + struct.pack("<I", 1 << 27) + b".",
        "a place in text": lambda: b"Np%d\n." % (1 << 27),
        "bytes that are not there": lambda: b"\x80\x04\x8e" + struct.pack("<Q", 1 << 30) + b"x.",
        "text that is not there": lambda: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 30) + b"x.",
        "an array that is not there": lambda: b"\x80\x05\x96" + struct.pack("<Q", 1 << 30) + b"x.",
        "a frame that is not there": lambda: b"\x80\x04\x95" + struct.pack("<Q", 1 << 30) + b"N.",
        "a number that is not there": lambda: b"\x80\x02\x8b" + struct.pack("<i", 1 << 30) + b"x.",
        "one text encoded 2,000 times": lambda: b"\x80\x02c_codecs\nencode\nq\x00X"
        + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\x01U\x06latin1q\x02]("
        + b"h\x00h\x01h\x02\x86R" * 2000 + b"e.",
        "lists 100,000 deep": lambda: b"]" * 100_000 + b"a" * 99_999 + b".",
        "a key 3,000 deep": lambda: b"}(" + b"N" + b"\x85" * 3000 + b"Nu.",
        "a key of 5,000 digits": lambda: b"\x80\x02}\x8b" + struct.pack("<i", 2100)
        + b"\x7f" * 2100 + b"Ns.",
        "a list in itself": lambda: b"\x80\x02]q\x00h\x00a.",
        "a dictionary in itself": lambda: b"\x80\x02}q\x00U\x04datah\x00s.",
        "no dictionary": lambda: pickle.dumps([1, 2]),
        "an extension": lambda: b"\x80\x02\x82\x01.",
        "an object of its own": lambda: b"\x80\x02Pabc\n.",
        "buffers from elsewhere": lambda: b"\x80\x05\x97.",
        "an old instance": lambda: b"(ios\nsystem\n.",
        "attributes of what it gets": lambda: b"\x80\x02cnumpy\ndtype\n}U\x08__code__Nsb.",
        "a million labels": lambda: pickle.dumps({"labels": [1] * 10**6, "data": b""}, 2),
    }  # fmt: skip
    return found
