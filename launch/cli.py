"""The command line. Parsing imports no torch; each command imports what it needs."""

import argparse
import errno
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from headstart import __version__
from headstart.heads.errors import GateFailed, StoreFailed, TrainingFailed, WrongInput
from headstart.launch.arguments import amount, lengths, positive, temperatures
from headstart.launch.processes import FROM_ACCELERATE, find_processes, resume_command
from headstart.trainer.interruption import polite_kill

DONE, FAULT, WRONG_INPUT, GATE_FAILED, INTERRUPTED = 0, 1, 2, 3, 130

EPILOG = """\
examples:
  headstart cp eagle mine.yaml              # a recipe of your own, ready to edit
  headstart check mine.yaml                 # find what is wrong before anything runs
  headstart train mine.yaml run.seed=1      # prompts, replies, head, measurements, export
  accelerate launch mine.yaml               # the same, with the recipe's own seed

exit codes: 0 done, 1 fault, 2 wrong input, 3 done but a gate failed, 130 interrupted
"""


def main() -> None:
    """Console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; a wrong input or a failed gate prints one message, no traceback."""
    options = parse(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe or a log shows how far it is, as a terminal does
    command: Callable[[argparse.Namespace], int | None] = options.command
    try:
        with polite_kill():
            return command(options) or DONE
    except WrongInput as error:
        return failed(WRONG_INPUT, f"error: {error}")
    except GateFailed as error:
        return failed(GATE_FAILED, f"gate failed: {error}")
    except TrainingFailed as error:
        return failed(FAULT, f"training failed: {error}")
    except StoreFailed as error:
        return failed(FAULT, f"error: {error}\nto continue from here: {resume_command(find_processes())}")
    except KeyboardInterrupt:
        if (processes := find_processes()).first:
            print(f"\ninterrupted; to continue from here: {resume_command(processes)}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output, `head` say, has gone
        sys.stderr.close()
        return DONE
    except Exception as error:
        if advice := disk_advice(error):
            return failed(FAULT, f"error: {error}\n{advice}")
        traceback.print_exc()
        return FAULT


def disk_advice(error: Exception) -> str:
    """What to do about a disk that cannot be written; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    named = re.search(r"os error (\d+)", str(error))  # the only place where safetensors tells it
    number = int(named[1]) if named else number
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            "The disk is full. Free some space, or set run.root to another disk; the same command continues from here."
        )
    if number in (errno.EROFS, errno.EACCES, errno.EPERM):
        return (
            "The file may not be written or read here. Give this user the right to, or set run.root to another folder."
        )
    return ""


def failed(code: int, message: str) -> int:
    """Print the message of a failure that needs no traceback; returns its exit code."""
    if (rank := os.environ.get("RANK", "0")) != "0":
        message = f"process {rank}: {message}"
    print(message, file=sys.stderr)
    if FROM_ACCELERATE in os.environ:
        print(f"(accelerate reports exit code {code} below with a traceback of its own)", file=sys.stderr)
    return code


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parsed arguments; `key=value` may stand before and after options, which argparse alone does not allow."""
    parser = build_parser()
    options, left = parser.parse_known_args(arguments)
    taken = [text for text in left if not text.startswith("-") and hasattr(options, "overrides")]
    if len(taken) < len(left):
        parser.error(f"unrecognized arguments: {' '.join(text for text in left if text not in taken)}")
    if taken:
        options.overrides += taken
    return options


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="headstart",
        description="Train, measure and export draft heads for lossless speculative decoding.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"headstart {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    check = add(commands, "check", check_command, "check a recipe against its target and prompts; nothing is computed")
    add_recipe(check, "headstart check recipes/eagle.yaml\n  headstart check mine.yaml train.depth=4 --dry-run")

    train = add(commands, "train", train_command, "run a recipe: prompts, traffic, features, train, eval, export")
    add_recipe(train, "headstart train recipes/smoke.yaml\n  headstart train eagle train.num_steps=200 run.name=quick")
    train.add_argument("--fresh", action="store_true", help="move an existing run of this name aside and start anew")

    train.add_argument(
        "--config-file",
        metavar="FILE",
        help="start processes as this accelerate config says (a file, or ddp, fsdp2, zero2, zero3)",
    )

    add_plan(commands)
    add_eval(commands)
    add_export_and_import(commands)

    inspect = add(commands, "inspect", inspect_command, "show training rows token by token, with what is supervised")
    inspect.add_argument(
        "run", metavar="RUN|RECIPE", help="a run, or a recipe that has not run: a few prompts are answered"
    )
    inspect.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe's")
    inspect.add_argument("--rows", type=positive, default=3, metavar="N", help="rows to show (default 3)")
    inspect.epilog = "examples:\n  headstart inspect eagle\n  headstart inspect mine.yaml --rows 5"

    compare = add(commands, "compare", compare_command, "compare measured heads, prompt by prompt")
    compare.add_argument(
        "runs", nargs="+", metavar="RUN", help="as for eval; the first is what the others are compared with"
    )
    compare.add_argument("--draft-length", type=positive, metavar="N", help="default: the longest measured")
    compare.add_argument("--draft", default="greedy", choices=["greedy", "sampled"], help="drafts (default greedy)")
    compare.epilog = (
        "examples:\n  headstart compare eagle eagle-2\n"
        "  headstart compare eagle/checkpoints/step-000300 eagle/checkpoints/step-000600 --draft-length 3"
    )

    vocab = add(commands, "vocab", vocab_command, "what smaller draft vocabularies cover of a run's replies, by route")
    vocab.add_argument("run", metavar="RUN", help="a run's name or folder; its replies are enough, no head is needed")
    vocab.add_argument("--sizes", type=lengths, default=[], metavar="N,N", help="draft tokens (default powers of two)")
    vocab.epilog = "examples:\n  headstart vocab eagle\n  headstart vocab eagle --sizes 2048,4096,8192"

    report = add(commands, "report", report_command, "write report.md and its plots again from a run's measurements")
    add_run(report, "headstart report eagle", overrides=False)

    ls = add(commands, "ls", ls_command, "list recipes, runs, heads or settings")
    ls.add_argument("what", nargs="?", default="recipes", choices=["recipes", "runs", "heads", "settings"])
    ls.add_argument("--root", default="runs", metavar="DIR", help="folder of the runs (default runs)")

    cp = add(commands, "cp", cp_command, "start a recipe of your own from another, with the launch lines in place")
    cp.add_argument("recipe", metavar="RECIPE", help="a recipe's name or file")
    cp.add_argument("file", metavar="FILE", help="the new file, or a folder for it")

    add(commands, "env", env_command, "print versions, hardware and folders, for a bug report")
    return parser


def add_plan(commands: "argparse._SubParsersAction[Parser]") -> None:
    plan = add(commands, "plan", plan_command, "tell what a recipe takes: memory, disk and hours, here or elsewhere")
    plan.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a built-in recipe")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe's")
    plan.add_argument("--processes", type=positive, default=1, metavar="N", help="processes, a device each (default 1)")
    plan.add_argument("--tokens", type=amount, default=0, metavar="N", help="of traffic (default: as the prompts say)")
    plan.add_argument("--tflops", type=amount, metavar="X", help="matrix products of a device, in TFLOP/s")
    plan.add_argument("--memory", type=amount, metavar="X", help="GB/s a device reads of its memory")
    plan.add_argument(
        "--link", type=amount, metavar="X", help="GB/s a device gathers from the others (default: --memory)"
    )
    plan.add_argument("--disk", type=amount, metavar="X", help="GB/s of run.root, for all processes together")
    plan.epilog = (
        "examples:\n  headstart plan eagle\n  headstart plan real/llama-3.3-70b --processes 8 --tokens 100e6 "
        "--tflops 400 --memory 2500 --link 300 --disk 5\n\nRates that are not given are measured on this machine."
    )


def add_eval(commands: "argparse._SubParsersAction[Parser]") -> None:
    evaluate = add(commands, "eval", eval_command, "measure a head: acceptance, losslessness, speed")
    add_run(
        evaluate,
        "headstart eval eagle --draft-length 2,3,4\n  headstart eval eagle --checkpoint last --speed --concurrency 1,4,16\n"
        "  headstart eval eagle --temperature 0,0.7,1",
    )
    evaluate.add_argument(
        "--checkpoint", default="best", metavar="NAME", help="best, last or step-000500 (default best)"
    )
    evaluate.add_argument("--draft-length", type=lengths, metavar="N,N", help="draft lengths of the acceptance table")
    evaluate.add_argument(
        "--temperature",
        type=temperatures,
        default=[],
        metavar="T,T",
        help="acceptance at these temperatures too, and nothing else unless named; held-out prompts are answered anew",
    )
    evaluate.add_argument("--offline", action="store_true", help="only the acceptance table, nothing is decoded")
    evaluate.add_argument("--live", action="store_true", help="only the live loop beside the acceptance table")
    evaluate.add_argument(
        "--lossless",
        action="store_true",
        help="only the losslessness certificate (and acceptance, where it is unknown)",
    )
    evaluate.add_argument("--prove", action="store_true", help="with --lossless: also catch the seeded faults")
    evaluate.add_argument("--speed", action="store_true", help="only timings beside the acceptance table")
    evaluate.add_argument(
        "--concurrency", type=lengths, metavar="N,N", help="with --speed: requests that run together (default 1)"
    )


def add_export_and_import(commands: "argparse._SubParsersAction[Parser]") -> None:
    export = add(commands, "export", export_command, "write a measured head for an engine")
    add_run(export, "headstart export eagle --engine vllm\n  headstart export eagle --engine llamacpp --out ./draft")
    export.add_argument(
        "--engine",
        required=True,
        choices=["vllm", "speculators", "sglang", "trtllm", "llamacpp", "transformers"],
        help="who will load it (speculators: vLLM's other layout)",
    )
    export.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: export/ENGINE in the run)")
    export.add_argument("--checkpoint", default="best", metavar="NAME", help="best, last or step-000500 (default best)")
    export.add_argument("--untested", action="store_true", help="export unmeasured or failed heads; the card says so")

    imported = add(commands, "import", import_command, "make a run of a published head, to measure it or go on from it")
    imported.add_argument("folder", metavar="FOLDER", help="an EAGLE-3, EAGLE or Medusa folder, a checkpoint, or a run")
    imported.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe's")
    imported.add_argument("--out", type=Path, required=True, metavar="RUN", help="name or folder of the new run")
    imported.add_argument(
        "--recipe",
        default="eagle",
        metavar="RECIPE",
        help="whose target, prompts and measurements to take (default eagle)",
    )
    imported.epilog = (
        "examples:\n  headstart import ./their-head --out theirs\n"
        "  headstart import ./their-head target.model=./my-target --out theirs --recipe mine.yaml"
    )


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of examples, and takes no abbreviated options."""

    def __init__(self, **options: object) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"error: {message}\nExamples and every option: {self.prog} --help\n")


def add(commands: "argparse._SubParsersAction[Parser]", name: str, command: Callable, text: str) -> Parser:
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    return parser


def add_recipe(parser: Parser, examples: str) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe file, or the name of a built-in recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the recipe's")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, with reasons, and stop")
    parser.epilog = f"examples:\n  {examples}\n\n`headstart ls settings` lists every key with its default."


def add_run(parser: Parser, examples: str, overrides: bool = True) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's name or folder, or a checkpoint or export folder of it")
    if overrides:
        parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the run's")
    parser.epilog = f"examples:\n  {examples}"


def check_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import check

    check(options.recipe, options.overrides, options.dry_run)


def plan_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import check
    from headstart.launch.planning.plan import Asked

    rates = {name: getattr(options, name) for name in ("tflops", "memory", "link", "disk")}
    asked = Asked(options.processes, int(options.tokens), {name: x for name, x in rates.items() if x is not None})
    check(options.recipe, options.overrides, dry_run=True, asked=asked)


def train_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import check, train

    if options.dry_run:
        check(options.recipe, options.overrides, dry_run=True)
    elif options.config_file:
        from headstart.launch.launcher import launch

        launch(options.config_file, options.recipe, [*options.overrides, *(["--fresh"] if options.fresh else [])])
    else:
        train(options.recipe, options.overrides, options.fresh)


def eval_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import evaluate

    overrides = list(options.overrides)
    if options.draft_length:
        overrides += [f"eval.draft_lengths={options.draft_length}", f"eval.draft_length={options.draft_length[-1]}"]
    if options.prove and not options.lossless:
        raise WrongInput("found --prove alone, expected it beside --lossless: headstart eval RUN --lossless --prove")
    if options.concurrency:
        if not options.speed:
            raise WrongInput(
                "found --concurrency alone, expected it beside --speed: headstart eval RUN --speed --concurrency 1,4"
            )
        overrides.append(f"eval.concurrency={options.concurrency}")
    parts = [part for part in ("offline", "live", "lossless", "prove", "speed") if getattr(options, part)]
    if options.temperature and not parts:
        parts = ["offline"]
    evaluate(options.run, options.checkpoint, overrides, parts, options.temperature)


def export_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import export

    export(options.run, options.checkpoint, options.engine, options.out, options.untested, options.overrides)


def import_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import import_head

    import_head(options.folder, options.out, options.recipe, options.overrides)


def inspect_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import inspect

    inspect(options.run, options.overrides, options.rows)


def compare_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import compare

    compare(options.runs, options.draft_length, options.draft)


def vocab_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import vocabulary

    vocabulary(options.run, options.sizes)


def report_command(options: argparse.Namespace) -> None:
    from headstart.launch.commands import report

    report(options.run)


def ls_command(options: argparse.Namespace) -> None:
    from headstart.launch import listing

    listing.show(options.what, Path(options.root))


def cp_command(options: argparse.Namespace) -> None:
    from headstart.launch.recipe import copy_recipe

    copy_recipe(options.recipe, Path(options.file))


def env_command(options: argparse.Namespace) -> None:
    from headstart.launch.listing import show_environment

    show_environment()
