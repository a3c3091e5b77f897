"""From a recipe to its stages: schema, command line, run folder, processes."""


def main(file: str, name: str) -> None:
    """Train the recipe `file`: the last line of a recipe calls this when Python runs it.

    Args:
        file: the recipe's `__file__`.
        name: its `__name__`; worker processes that import the file again must not start a second training.
    """
    if name != "__main__":
        return
    import os
    import sys

    # Python puts the script's folder first; a file there must not stand in for a library of the same name.
    if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(file)):
        del sys.path[0]
    from headstart.launch.cli import run

    sys.exit(run(["train", file, *sys.argv[1:]]))
