"""How often the losslessness tests raise a false alarm, and how surely they catch the seeded faults.

    python bench/alarms.py [--runs 1000] [--seed 0]

A clean run tests 2,000 sampled replies and 2,000 tokens of long replies of a sound decoder; a p-value below a level
should come up as often as the level says.
"""

import argparse
import time

from headstart.launch.threads import apply_threads, choose_threads

LEVELS = (0.1, 0.01, 1e-3, 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="clean runs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    apply_threads(choose_threads(1, local_world_size=1))
    from headstart.eval.faults import false_alarms, prove

    began = time.perf_counter()
    print(f"{'alarms of ' + str(arguments.runs) + ' clean runs':<32}" + "".join(f"{f'p < {x:g}':>12}" for x in LEVELS))
    for name, p_values in false_alarms(arguments.runs, arguments.seed).items():
        print(f"{name:<32}" + "".join(f"{int((p_values < level).sum()):>12}" for level in LEVELS))
    print(f"{time.perf_counter() - began:.1f} s\n")

    began = time.perf_counter()
    faults, problems = prove(arguments.seed)
    print(f"{'seeded fault':<32}{'law differs by':>16}{'acceptance by':>16}{'p':>12}  caught by")
    for fault in faults:
        caught = ", ".join([str(fault["caught_by"]), *fault["also_caught_by"]])
        figures = [fault.get(name) for name in ("max_difference", "acceptance_difference", "p_value")]
        shown = ["-" if x is None else f"{x:.2g}" for x in figures]
        print(f"{fault['name']:<32}{shown[0]:>16}{shown[1]:>16}{shown[2]:>12}  {caught}")
    print(f"{time.perf_counter() - began:.1f} s, problems: {problems or 'none'}")


if __name__ == "__main__":
    main()
