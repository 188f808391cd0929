"""The versions that are supported, each in an environment of its own: `nox`, `nox -s oldest`.

A session that lacks its interpreter is skipped. Where torch comes with CUDA, one takes 6 GB.
"""

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False

OLDEST = ("torch==2.6.0", "numpy<2")  # with Triton 3.2, which is too old for the kernels
TESTED = "package coordinates layer layer_errors networks cost records engine resume weights"
# With what others' networks need besides. Their newest versions, too.
FOREIGN = "surgery surgery_errors surgery_unusual surgery_afterwards surgery_uses sharing_inserted"
FOREIGN += " timm peers finetune_names finetune_weights export indices folding symbolic transforms"
FOREIGN += " command_compare"
KERNELS = "backends tail tail_compiled windows dense"
# Triton 3.4's interpreter takes arrays of one number for numbers: NumPy 2.4 refuses, earlier ones
# warn.
SCALARS = "ignore:Conversion of an array with ndim:DeprecationWarning"
TOOLS = ("beartype", "hypothesis", "jaxtyping", "pytest")


def _install(session: nox.Session, *packages: str, extras: str = "lab") -> None:
    session.install("-e", f".[{extras}]", *TOOLS, *packages)


def _pytest(session: nox.Session, tests: str, *options: str) -> None:
    versions = "import numpy, sys, torch; print(sys.version, torch.__version__, numpy.__version__)"
    session.run("python", "-c", versions)
    files = [f"tests/test_{name}.py" for name in tests.split()]
    session.run("pytest", "-q", *options, *(session.posargs or files))


def _test(session: nox.Session, *packages: str) -> None:
    _install(session, *packages)
    _pytest(session, TESTED)


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def newest(session: nox.Session) -> None:
    """The newest torch and NumPy there are for each Python."""
    _test(session, "--upgrade", "torch", "numpy")


@nox.session(python=["3.11", "3.12", "3.13"])
def foreign(session: nox.Session) -> None:
    """The newest torch, torchvision, timm and ONNX, with others' networks."""
    _install(session, "--upgrade", "torch", "timm", extras="lab,timm,images,export,hub")
    _pytest(session, FOREIGN)


@nox.session(python=["3.11", "3.12"])
def oldest(session: nox.Session) -> None:
    """The oldest torch, with NumPy 1."""
    _test(session, *OLDEST)


@nox.session(python="3.12")
def kernels(session: nox.Session) -> None:
    """The oldest Triton that the kernels take, by its interpreter."""
    _install(session, "torch==2.8.0", "triton==3.4.0", "numpy<2.4")
    _pytest(session, KERNELS, "-W", SCALARS)


@nox.session(python="3.12")
def without_triton(session: nox.Session) -> None:
    """As on a machine that Triton is not built for."""
    _install(session)
    session.run("pip", "uninstall", "--yes", "--quiet", "triton")
    _pytest(session, TESTED)
