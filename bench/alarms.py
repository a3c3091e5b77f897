"""How often the losslessness tests raise a false alarm, and how surely they catch the seeded faults.

    python bench/alarms.py [--runs 1000] [--tiny-runs 40] [--seed 0]

A clean run tests 2,000 sampled replies and 2,000 tokens of long replies of a sound toy decoder, or 400 replies and 960
tokens of the reference decoder on the tiny target; a p-value below a level should come up as often as the level says.
"""

import argparse
import time

from headstart.launch.threads import apply_threads, choose_threads

LEVELS = (0.1, 0.01, 1e-3, 1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="clean runs on the toy")
    parser.add_argument("--tiny-runs", type=int, default=40, help="clean runs on the tiny target")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    apply_threads(choose_threads(1, local_world_size=1))
    from headstart.eval.proof import false_alarms, false_alarms_on_tiny, prove

    for target, num_runs, alarms in (
        ("toy", arguments.runs, false_alarms),
        ("tiny", arguments.tiny_runs, false_alarms_on_tiny),
    ):
        began = time.perf_counter()
        print(f"{f'alarms of {num_runs} clean runs on {target}':<40}" + "".join(f"{f'p < {x:g}':>12}" for x in LEVELS))
        for name, p_values in alarms(num_runs, arguments.seed).items():
            print(f"{name:<40}" + "".join(f"{int((p_values < level).sum()):>12}" for level in LEVELS))
        print(f"{time.perf_counter() - began:.1f} s\n")

    began = time.perf_counter()
    faults, problems = prove(arguments.seed)
    print(f"{'seeded fault':<32}{'law differs by':>16}{'acceptance by':>16}{'p':>12}  caught on  by")
    for fault in faults:
        caught = ", ".join([str(fault["caught_by"]), *fault["also_caught_by"]])
        figures = [fault.get(name) for name in ("max_difference", "acceptance_difference", "p_value")]
        shown = ["-" if x is None else f"{x:.2g}" for x in figures]
        print(f"{fault['name']:<32}{shown[0]:>16}{shown[1]:>16}{shown[2]:>12}  {fault['target']:<9}  {caught}")
    print(f"{time.perf_counter() - began:.1f} s, problems: {problems or 'none'}")


if __name__ == "__main__":
    main()
