"""Finding a compiler, compiling into a shared folder, and what happens where that is not possible."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import goldens
from deepinfer import log
from deepinfer.backends.cpu import build, library
from waiting import PATIENCE


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody names instruction sets, whoever runs these tests."""
    monkeypatch.delenv("CPU_INSTRUCTIONS", raising=False)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source folder that compiles fast, and an empty cache folder."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "answer.h").write_text("constexpr int ANSWER = 42;\n")
    (sources / "answer.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "FLAGS", ("-std=c++17", "-fPIC"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return sources


def answer(file: Path) -> int:
    return ctypes.CDLL(str(file)).answer()


def test_a_library_is_compiled_once(small, tmp_path, monkeypatch):
    first = build.library_file()
    assert first.parent == tmp_path / "cache" / "deepinfer" / "native"
    assert answer(first) == 42
    monkeypatch.setattr(build, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert build.library_file() == first


def test_changed_sources_make_another_library(small):
    first = build.library_file()
    (small / "answer.h").write_text("constexpr int ANSWER = 43;\n")
    second = build.library_file()
    assert (answer(first), answer(second)) == (42, 43)


def test_other_processor_features_make_another_library(small, monkeypatch):
    first = build.library_file()
    if not build.cpu_features(build.find_compiler()):
        pytest.skip("this processor has no instruction set that could be missing")
    monkeypatch.setattr(build, "cpu_features", lambda compiler: ())
    assert build.library_file() != first


def test_nothing_but_the_library_is_left_behind(small):
    folder = build.library_file().parent
    assert sorted(file.suffix for file in folder.iterdir()) == [".lock", ".so"]


def test_where_the_cache_cannot_be_written_a_temporary_folder_serves(small, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # a folder cannot be made below a file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = build.library_file()
    assert answer(file) == 42
    assert file.parent == tmp_path / f"deepinfer-{os.getuid()}"
    assert build.library_file() == file


def test_a_library_in_somebody_else_s_folder_is_not_loaded(small, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    build.library_file()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(build.BuildError, match="XDG_CACHE_HOME"):
        build.library_file()


def test_processes_that_build_at_the_same_time_get_the_same_library(small, tmp_path):
    code = (
        "import sys; from pathlib import Path; from deepinfer.backends.cpu import build;"
        "build.SOURCES, build.FLAGS = Path(sys.argv[1]), ('-std=c++17', '-fPIC');"
        "print(build.library_file())"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[3])}
    command = [sys.executable, "-c", code, str(small)]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate(timeout=PATIENCE)[0].strip() for process in running}
    assert len(printed) == 1
    assert answer(Path(printed.pop())) == 42


def test_sources_that_do_not_compile_say_why(small):
    (small / "answer.cpp").write_text("this is no C++\n")
    with pytest.raises(build.BuildError, match=r"failed: .*answer\.cpp"):
        build.library_file()


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.BuildError, match=r"c\+\+, g\+\+, clang\+\+"):
        build.find_compiler()


def test_without_a_compiler_there_is_one_warning_that_says_what_is_lost(monkeypatch, caplog):
    def fail():
        raise build.BuildError("no C++ compiler found")

    monkeypatch.setattr(library, "native", fail)
    log.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "deepinfer"):
        assert not library.is_available()
        assert not library.is_available()
    log.warn_once.cache_clear()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no C++ compiler found" in caplog.text
    assert "times slower" in caplog.text


ALL = "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512vbmi avx512_bf16 amx_tile amx_bf16"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the system tell of a processor with these flags, whose matrix unit may be used."""

    def pretend(flags: str) -> None:
        monkeypatch.setattr(Path, "read_text", lambda self: f"processor : 0\nflags\t\t: {flags}\n")

    monkeypatch.setattr(build, "_grants_tiles", lambda: True)
    monkeypatch.setattr(build, "_accepts", lambda compiler, features: True)
    return pretend


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx avx2 fma f16c", build.AVX2),
        ("fpu avx avx2 fma", ()),
        (ALL, build.AMX),
        (ALL.replace("amx_tile", ""), build.AVX512BF16),
        (ALL.replace("avx512_bf16 amx_tile", ""), build.AVX512),
        ("avx2 fma f16c avx512f avx512bw", build.AVX2),
        ("", ()),
    ],
)
def test_instruction_sets_are_used_when_the_processor_has_all_of_them(flags, expected, processor):
    processor(flags)
    assert build.cpu_features("c++") == expected


def test_what_system_or_compiler_does_not_know_is_not_used(processor, monkeypatch):
    processor(ALL)
    monkeypatch.setattr(build, "_grants_tiles", lambda: False)
    assert build.cpu_features("c++") == build.AVX512BF16
    monkeypatch.setattr(build, "_accepts", lambda compiler, features: "avx512_bf16" not in features)
    assert build.cpu_features("c++") == build.AVX512
    monkeypatch.setattr(build, "_accepts", lambda compiler, features: "avx512f" not in features)
    assert build.cpu_features("c++") == build.AVX2


def test_flags_are_named_as_compilers_name_them():
    assert build.feature_flags(("avx512_bf16", "amx_tile")) == ("-mavx512bf16", "-mamx-tile")


def test_a_compiler_is_asked_for_what_it_knows():
    assert build._accepts(build.find_compiler(), ())
    assert not build._accepts(build.find_compiler(), ("no_such_feature",))


def test_instruction_sets_may_be_named(processor, monkeypatch):
    processor(ALL)
    monkeypatch.setenv("CPU_INSTRUCTIONS", "avx2")
    assert build.cpu_features("c++") == build.AVX2
    processor("fpu")
    with pytest.raises(build.BuildError, match="'avx2'; this processor"):
        build.cpu_features("c++")
    monkeypatch.setenv("CPU_INSTRUCTIONS", "avx3")
    with pytest.raises(build.BuildError, match="'avx3'; it must be one of amx, avx512bf16, avx512, avx2, portable"):
        build.cpu_features("c++")


def test_a_processor_that_nothing_is_known_of_gets_the_portable_library(monkeypatch):
    def missing(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert build.cpu_features(build.find_compiler()) == ()


def test_other_libraries_with_functions_of_the_same_names_are_not_called(tmp_path):
    """zlib has a `compress`, which a Python that is linked to it offers to every library."""
    names = [name for name in library.SIGNATURES if name != "set_num_threads"]
    source = tmp_path / "others.cpp"
    source.write_text("#include <cstdlib>\n" + "\n".join(f'extern "C" void {name}() {{ abort(); }}' for name in names))
    others = tmp_path / "others.so"
    subprocess.run([build.find_compiler(), "-shared", "-fPIC", str(source), "-o", str(others)], check=True)
    code = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL);"
        "from deepinfer import LLM, SamplingParams;"
        "llm = LLM(sys.argv[2], device='cpu', max_num_requests=2);"
        "print(len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids)); llm.close()"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(build.__file__).parents[3])}
    command = [sys.executable, "-c", code, str(others), str(goldens.CHECKPOINT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr
