"""What a target takes of each process's memory when it is spread over two of them, against one that holds it whole.

    python bench/sharded.py [--layers 28] [--width 1024]

A random Llama is written to a temporary folder, by default one of 1.8 GB. One process and then two read the same paths in
float32. Peaks are the kernel's (VmHWM), above what the process took once everything was imported; pages of weight files that
are mapped while they are read count too.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

NUM_PATHS, PATH_TOKENS = 4, 65


def write_model(folder: Path, num_layers: int, width: int) -> int:
    """A random Llama with a file for every layer; returns the bytes of its weights."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from headstart.heads.store import write_json
    from headstart.heads.tiny import tiny_tokenizer

    config = LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=num_layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 256, max_position_embeddings=1024,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = re.search(r"layers\.(\d+)\.", name)
        files.setdefault(f"model-{layer[1] if layer else 'ends'}.safetensors", []).append(name)
    random, size = torch.Generator().manual_seed(0), 0
    for file, names in files.items():
        tensors = {name: random_weight(shapes[name], random) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        size += sum(tensor.nbytes for tensor in tensors.values())
    places = {name: file for file, names in files.items() for name in names}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": places})
    return size


def random_weight(shape: tuple[int, ...], random: Any) -> Any:
    """Fan-in scaling; ones for norms."""
    import torch

    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) / shape[-1] ** 0.5


def measure(folder: Path, out: Path) -> None:
    """In a process of its own: load, read, and write peaks and states; by torchrun's environment, with its peers."""
    import torch
    from safetensors.torch import save_file

    from headstart.heads.settings import TargetSettings
    from headstart.heads.sharded_target import load_sharded
    from headstart.heads.target import TargetLoader
    from headstart.trainer.ranks import joined

    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # By transformers' own layers in either case: ours keep a second copy of every weight, laid out for the CPU.
    loader = TargetLoader(TargetSettings(model=str(folder), dtype="float32", device="cpu", attention="sdpa"))
    random = np.random.default_rng(0)
    paths = [random.integers(3, 500, PATH_TOKENS) for _ in range(NUM_PATHS)]

    def run() -> None:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        target = loader()
        loaded = status("VmHWM") - before
        with target.together():
            states = target.read(paths)
        peaks = {"loading": loaded, "in all": status("VmHWM") - before}
        held = target.held_bytes() if target.sharded else {}
        out.with_suffix(f".{rank}.json").write_text(json.dumps({**peaks, "held": held}))
        save_file(
            {str(i): torch.cat([x.taps, x.final], 1) for i, x in enumerate(states)}, out.with_suffix(f".{rank}.st")
        )

    if world == 1:
        run()
        return
    with joined(rank, world, rank, "cpu") as ranks:
        loader.load_by(partial(load_sharded, vote=ranks.any))
        run()


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[1])


def start(folder: Path, out: Path, world: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "0"}
    if world > 1:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    command = [sys.executable, __file__, "--measure", str(folder), "--out", str(out)]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(world)]
    codes = [process.wait() for process in ranks]
    if any(codes):
        raise SystemExit("a process failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.out)
        return
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "target"
        folder.mkdir()
        size = write_model(folder, given.layers, given.width)
        for world in (1, 2):
            start(folder, Path(temporary) / f"of-{world}", world)
        found = {
            (w, r): json.loads((Path(temporary) / f"of-{w}.{r}.json").read_text()) for w, r in ((1, 0), (2, 0), (2, 1))
        }
        whole = load_file(Path(temporary) / "of-1.0.st")
        apart = 0.0
        for rank in range(2):
            other = load_file(Path(temporary) / f"of-2.{rank}.st")
            apart = max(apart, *(float((other[k] - x).abs().max() / x.abs().max()) for k, x in whole.items()))
    print(
        f"random Llama of {given.layers} layers, {size / 1e9:.2f} GB in float32; {NUM_PATHS} paths of {PATH_TOKENS} tokens"
    )
    print(f"{'process':14}{'loading':>12}{'in all':>12}{'of one':>9}   weights held")
    for (world, rank), peaks in found.items():
        held = ", ".join(f"{name} {value / 1e6:,.0f} MB" for name, value in peaks["held"].items()) or "all"
        share = peaks["in all"] / found[1, 0]["in all"]
        sizes = "".join(f"{peaks[name] / 1e6:>9,.0f} MB" for name in ("loading", "in all"))
        print(f"{f'{rank + 1} of {world}':14}{sizes}{share:>9.0%}   {held}")
    print(f"largest difference of states: {apart:.1e} of the largest state")


if __name__ == "__main__":
    main()
