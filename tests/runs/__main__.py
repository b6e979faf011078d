"""The command: ``python -m tests.runs --steps 1000000 --seed 1``."""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import time

from tests.runs import episode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.runs", description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first episode (%(default)s)")
    where = "cpu, cuda, or a GPU to emulate, as sm_90 (%(default)s)"
    parser.add_argument("--device", default="cpu", help=where)
    parser.add_argument("--only", metavar="N,N", help="replay these actions of one episode")
    parser.add_argument("--workers", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no episode after so long")
    given = parser.parse_args()
    try:
        if given.only is not None:
            return _only(given.seed, {int(n) for n in given.only.split(",")}, given.device)
        if given.workers > 1:
            return _shared(given)
        return _run(given.seed, given.steps, given.device, given.seconds)
    except episode.EpisodeError as failed:
        print(episode.report(failed, given.device))
        return 1


def _run(first: int, steps: int, device: str, seconds: float) -> int:
    """Episodes one after another; a run goes on with ``--seed`` of the line printed last."""
    begun = shown = time.monotonic()
    counts: episode.Counts = collections.Counter()
    seed, left = first, steps
    while left > 0 and time.monotonic() - begun < seconds:
        counts += episode.run(seed, min(left, episode.STEPS), device)
        left -= min(left, episode.STEPS)
        seed += 1
        now = time.monotonic()
        if now - shown > 20:
            shown = now
            rate = (steps - left) / (now - begun)
            print(f"{steps - left:,} steps, {rate:.0f} a second; next --seed {seed}", flush=True)
    took = time.monotonic() - begun
    print(f"{steps - left:,} steps in {took:.0f} s on {device}, seeds {first} to {seed - 1}: pass")
    print(", ".join(f"{n:,} {kind}" for kind, n in counts.most_common()))
    return 0


def _shared(given: argparse.Namespace) -> int:
    """The same by several processes. Each runs a part of the seeds."""
    episodes = -(-given.steps // episode.STEPS)
    workers = min(given.workers, episodes)
    running = []
    for i in range(workers):
        first, after = (episodes * n // workers for n in (i, i + 1))
        steps = min(after * episode.STEPS, given.steps) - first * episode.STEPS
        line = [sys.executable, "-m", "tests.runs", "--seed", str(given.seed + first)]
        line += ["--steps", str(steps), "--device", given.device, "--seconds", str(given.seconds)]
        running.append(subprocess.Popen(line))
    codes = [process.wait() for process in running]  # below 0: killed by a signal
    seeds = f"seeds {given.seed} to {given.seed + episodes - 1}"
    print(f"{workers} processes, {seeds}: {'FAILED' if any(codes) else 'pass'}")
    return int(any(codes))


def _only(seed: int, numbers: set[int], device: str) -> int:
    """The episode draws its actions again, then some of them run by themselves."""
    try:
        episode.run(seed, episode.STEPS, device)
    except episode.EpisodeError as failed:
        chosen = [a for a in failed.actions if a.number in numbers]
        for action in chosen:
            print(action)
        episode.replay(seed, chosen, device)
        print("these actions pass by themselves")
        return 0
    print("the whole episode passes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
