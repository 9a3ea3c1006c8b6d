"""Compiling the native sources at first use, into a folder of the user that is shared by all processes.

The library's name is a hash of everything that decides its content: sources, compiler, flags. A
process that finds it loads it; otherwise one process compiles while the others wait for its lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deepinfer import env, log

logger = log.get(__name__)
SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off",
    "-Wno-psabi",
)  # fmt: skip
AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
AMX = (*AVX512, "amx_tile", "amx_bf16")
AVX512BF16 = (*AVX512, "avx512vbmi", "avx512_bf16")
INSTRUCTIONS = {"amx": AMX, "avx512bf16": AVX512BF16, "avx512": AVX512, "avx2": AVX2, "portable": ()}  # best first
TIMEOUT_S = 300
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # system call, request, component


class BuildError(Exception):
    """The native library cannot be had on this machine; the message says why."""


def library_file() -> Path:
    """The compiled library, built now if it is not there. Raises BuildError."""
    compiler = find_compiler()
    flags = (*FLAGS, *feature_flags(cpu_features(compiler)))
    files = sorted(SOURCES.iterdir())
    digest = hashlib.sha256("\0".join((_version(compiler), platform.machine(), *flags)).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    name = f"deepinfer-{digest.hexdigest()[:24]}.so"
    for folder in _folders():
        target = folder / name
        try:
            _make_private(folder)
            if target.exists():
                return target
            with _locked(folder / f"{name}.lock"):
                if not target.exists():
                    _compile([compiler, *flags], [file for file in files if file.suffix == ".cpp"], target)
            return target
        except OSError as error:
            logger.info("cannot write to %s (%s); trying elsewhere", folder, error)
    raise BuildError("no folder can be written to; set XDG_CACHE_HOME to one that can")


def find_compiler() -> str:
    """The C++ compiler: the variable CXX, else the first of the usual names. Raises BuildError."""
    wanted = env.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise BuildError(f"no C++ compiler found ({wanted or ', '.join(COMPILERS)}); install g++ or set CXX to one")


def cpu_features(compiler: str) -> tuple[str, ...]:
    """The instruction sets to compile for, as /proc/cpuinfo names them; () = any processor.

    The best that processor, system and compiler have, or those that the variable CPU_INSTRUCTIONS names.
    Raises BuildError when they are not there.
    """
    wanted = env.get("CPU_INSTRUCTIONS") or ""
    if wanted and wanted not in INSTRUCTIONS:
        raise BuildError(f"CPU_INSTRUCTIONS is {wanted!r}; it must be one of {', '.join(INSTRUCTIONS)}")
    known = _known_features()
    for name, features in INSTRUCTIONS.items():
        if wanted in ("", name) and known.issuperset(features) and _accepts(compiler, features):
            return features
    raise BuildError(f"CPU_INSTRUCTIONS is {wanted!r}; this processor or compiler lacks them")


def feature_flags(features: tuple[str, ...]) -> tuple[str, ...]:
    """Instruction sets as compiler flags."""
    return tuple(f"-m{feature.replace('avx512_', 'avx512').replace('_', '-')}" for feature in features)


def _known_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    known = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return known if _grants_tiles() else known - {"amx_tile", "amx_bf16"}


def _grants_tiles() -> bool:
    """Ask the system for the matrix unit's registers, for this process; Linux hands them out on request only."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)


def _accepts(compiler: str, features: tuple[str, ...]) -> bool:
    command = [compiler, *feature_flags(features), "-E", "-x", "c++", os.devnull, "-o", os.devnull]
    try:
        _run(command)
    except BuildError:
        return False
    return True


def _folders() -> Iterator[Path]:
    """The cache folder of the user, then one that lasts as long as this machine's temporary files."""
    home = env.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home folder
        yield (Path(home) if home else Path.home() / ".cache") / "deepinfer" / "native"
    yield Path(tempfile.gettempdir()) / f"deepinfer-{os.getuid()}"


def _make_private(folder: Path) -> None:
    """Make the folder, ours alone. Raises OSError when it is somebody else's, whose code we would run."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _compile(command: list[str], sources: list[Path], target: Path) -> None:
    """Compile next to the target, then move it into place, so that nobody ever loads half a file."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        jobs = [[*command, "-c", str(source), "-o", made] for source, made in zip(sources, objects, strict=True)]
        list(workers.map(_run, jobs))
        made = f"{folder}/{target.name}"
        _run([*command, "-shared", *objects, "-o", made])
        os.replace(made, target)
    logger.info("compiled the native ops into %s", target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot run {command[0]} ({error})") from error
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the file's lock; without locks on this system two processes may compile the same thing."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
