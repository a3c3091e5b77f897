"""`accelerate launch -m headstart.launch RECIPE [key=value ..]`: train a recipe, plain YAML too."""

import sys

from headstart.launch.cli import run

if __name__ == "__main__":
    sys.exit(run(["train", *sys.argv[1:]]))
