"""What every test stands on: tiny real models made offline, one thread, no network."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.launch.threads import THREAD_VARIABLES


def pytest_configure(config: pytest.Config) -> None:
    """One thread: OpenMP threads that wait for each other make small models slower, and machines are shared."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["WANDB_MODE"] = "offline"
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A command that ran in this process took all cores, for itself and for what it would start; the next test has one."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    yield
    import torch

    torch.set_num_threads(1)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    """Folder of the random Llama with an untied output head."""
    from headstart.heads.builtin import resolve_model

    return resolve_model("tiny")


@pytest.fixture(scope="session")
def tiny_target():
    """The random Llama in float32 with the default taps, on the CPU."""
    from headstart.heads.settings import TargetSettings
    from headstart.heads.target import load_target

    return load_target(TargetSettings(model="tiny", dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def tiny_tied_target():
    """The same with the embedding as its output head."""
    from headstart.heads.settings import TargetSettings
    from headstart.heads.target import load_target

    return load_target(TargetSettings(model="tiny-tied", dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def tiny_shipped_target(tmp_path_factory):
    """A random GLM with experts that ships an MTP layer, in several files."""
    from headstart.heads.settings import TargetSettings
    from headstart.heads.target import load_target
    from tests.shipped_targets import write_target

    folder = write_target(tmp_path_factory.mktemp("shipped"), "glm4_moe", shards=True)
    return load_target(TargetSettings(model=str(folder), dtype="float32", device="cpu"))


@pytest.fixture
def target(kind, request):
    """A tiny target that a head of this kind can be made for (the `FORMS` of tests/kinds.py)."""
    return request.getfixturevalue("tiny_shipped_target" if kind == "mtp/shipped" else "tiny_target")
