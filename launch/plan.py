"""What training a recipe would do: derived values with reasons, stages that run or are reused, disk."""

from pathlib import Path

from headstart.heads.store import hash_json, read_json, stage_folder
from headstart.launch.check import Checked, feature_bytes, free_bytes
from headstart.launch.settings import Recipe
from headstart.trainer.prompts import prompt_inputs

Row = tuple[str, str, str]


def print_plan(recipe: Recipe, path: Path, checked: Checked, threads: str) -> None:
    """Print the plan of a checked recipe."""
    root = Path(recipe.run.root).expanduser().resolve()
    number, _, reason = threads.partition(" ")
    table("derived", [("threads", number, reason.strip("()")), *derived(recipe, checked)])
    table("prompts", [(line, "", "") for line in checked.prompts.describe().splitlines()])
    table("stages", stages(recipe, path, root))
    table("disk", disk(recipe, checked, root))


def table(title: str, rows: list[Row]) -> None:
    print(title)
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for name, value, reason in rows:
        print(f"  {name.ljust(widths[0])}  {value.ljust(widths[1])}  {reason}".rstrip())
    print()


def derived(recipe: Recipe, checked: Checked) -> list[Row]:
    """Values that the recipe leaves open, as this machine and this target fill them in."""
    from headstart.heads.target import choose_device, choose_dtype
    from headstart.trainer.precision import choose_precision

    target = checked.target
    device = choose_device(recipe.target.device)
    auto = "as the recipe says"
    dtype = str(choose_dtype(recipe.target.dtype)).removeprefix("torch.")
    rows = [
        ("target", recipe.target.model, f"{target.num_layers} layers, width {target.hidden_size}, {target.folder}"),
        ("device", str(device), "no accelerator" if device.type == "cpu" and recipe.target.device == "auto" else auto),
        (
            "target.dtype",
            dtype,
            "halves the memory traffic that bounds decoding" if recipe.target.dtype == "auto" else auto,
        ),
        ("head.taps", str(target.taps(recipe)), auto if recipe.head.taps else "2, N // 2, N - 3: what engines read"),
    ]
    size = recipe.head.draft_vocab_size or target.num_tokens
    rows.append(("draft vocabulary", str(size), f"of {target.num_tokens} tokens, {size / target.num_tokens:.0%}"))
    precision = choose_precision(recipe.train.dtype, device)
    rows.append(("train.dtype", str(precision.dtype).removeprefix("torch."), precision.reason))
    tokens = recipe.train.num_steps * recipe.train.batch_tokens
    rows.append(("training tokens", f"{tokens:,}", f"{recipe.train.num_steps} steps of {recipe.train.batch_tokens}"))
    return rows


def stages(recipe: Recipe, path: Path, root: Path) -> list[Row]:
    """Each stage with its key, and whether it is reused, continued or run."""
    key = hash_json(prompt_inputs(recipe.prompts, path.parent, recipe.run.seed))
    return [stage_row(root, "prompts", key)]


def stage_row(root: Path, stage: str, key: str) -> Row:
    manifest = stage_folder(root, stage, key) / "manifest.json"
    if not manifest.exists():
        return stage, key[:12], "runs"
    found = read_json(manifest)
    if found["state"] == "complete":
        return stage, key[:12], "reused"
    return stage, key[:12], f"continues, {len(found['outputs'])} files are there"


def disk(recipe: Recipe, checked: Checked, root: Path) -> list[Row]:
    most, per_token = feature_bytes(recipe, checked)
    return [
        ("features", f"up to {gib(most)}", f"{per_token:,} bytes a token, if every reply runs to its limit"),
        ("free", gib(free_bytes(root)), f"at {root}"),
    ]


def gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**29 else f"{number / 2**20:.1f} MiB"
