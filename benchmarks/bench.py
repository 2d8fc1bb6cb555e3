"""Benchmarks of the learner, the controller, faults and settings.

    python benchmarks/bench.py learner [--json FILE] [--shapes NAME ...] [--repeats N] [--dense]
    python benchmarks/bench.py server [--json FILE] [--engine NAME] [--lengths N ...] [--rounds N]
    python benchmarks/bench.py overhead [--json FILE] [--sizes N ...] [--workers N]
    python benchmarks/bench.py capture [--json FILE] [--programs N] [--calls N] [--beside PEER ...]
    python benchmarks/bench.py env-server [--json FILE] [--sizes N ...] [--steps N]
    python benchmarks/bench.py chaos [--json FILE] [--long | --short] [--times N] [--seconds S]
    python benchmarks/bench.py peers [--json FILE] [--only NAME ...] [--sizes N ...] [--rounds N]
    python benchmarks/bench.py simulate CONFIG [key.sub=value ...] [--trace RUN] [--steps N]

`learner` compares training on trees with training on flat sequences (layouts.py). `server` measures
the CPU cost of a token in the API server of vLLM or SGLang (server_cost.py). `overhead` measures
the CPU cost of the controller with thousands of rollouts (overhead.py). `capture` measures the cost
of a model call that the endpoint captures (captured.py). `env-server` times the steps in sessions
of `agentenv serve-env` (env_server.py). `chaos` measures the goodput of a run during a storm of
faults, and fails if a tree is lost or trained twice (chaos.py). `simulate` predicts a run under
other settings from the timings of a recorded run (simulation.py). `peers` measures other projects
on the workload of `overhead`, and installs them. `--json -` prints only the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":  # run by its path: the repository root is what holds the packages
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Threads that wait by spinning would be counted as work.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import msgspec
from msgspec.structs import asdict
from rich.table import Table

from agentenv.assembly.run.terminal import View
from agentenv.base.errors import AgentEnvError, ConfigError

Reporter = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and return the exit status."""
    options = _parse(argv)
    view = View()
    try:
        if options.json and not is_alone(options):
            check_target(options.json)
        return RUNS[options.part](options, view)
    except (AgentEnvError, OSError) as error:
        view.fail(str(error))
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")

    def part(name: str, about: str) -> argparse.ArgumentParser:
        found = parts.add_parser(name, help=about)
        found.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
        return found

    def number(parser: argparse.ArgumentParser, name: str, default: int, about: str) -> None:
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{about}; default {default}"
        )

    learner = part("learner", "trees compared with flat layouts")
    learner.add_argument("--shapes", nargs="+", metavar="NAME", help="only these; default all")
    number(learner, "--repeats", 3, "report the median of N repeats")
    learner.add_argument("--dense", action="store_true", help="also trees with a dense mask")
    server = part("server", "CPU of an API server by kind of request and turn length")
    server.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    server.add_argument("--lengths", nargs="+", type=int, metavar="N", help="tokens per turn")
    number(server, "--rounds", 3, "report the median of N rounds")
    server.add_argument(
        "--python", default="", metavar="PATH", help="Python interpreter with the engine installed"
    )
    overhead = part("overhead", "CPU, lag and memory of the controller")
    overhead.add_argument(
        "--sizes", nargs="+", type=int, metavar="N", help="concurrent rollouts; default 1000 10000"
    )
    number(overhead, "--workers", 1, "rollout workers; 0: rollouts run in the controller")
    capture = part("capture", "CPU of a call that the endpoint captures")
    number(capture, "--programs", 500, "concurrent programs")
    number(capture, "--calls", 6, "calls per program")
    capture.add_argument(
        "--beside", nargs="+", metavar="PEER", help="also measure openenv, verifiers"
    )
    number(capture, "--rounds", 3, "with --beside, report the median of N rounds")
    env_server = part("env-server", "step times in sessions of agentenv serve-env")
    env_server.add_argument(
        "--sizes", nargs="+", type=int, metavar="N", help="concurrent sessions; default 512 2048"
    )
    number(env_server, "--steps", 8, "steps per session")
    chaos = part("chaos", "a run in a fault storm, compared with a calm run")
    form = chaos.add_mutually_exclusive_group()
    form.add_argument("--long", action="store_true", help="20 minutes, vLLM servers on the CPU")
    form.add_argument("--short", action="store_true", help="a smoke test of some seconds")
    number(chaos, "--times", 1, "number of storms")
    chaos.add_argument(
        "--seconds", type=float, metavar="S", help="length of the calm run; default 300"
    )
    peers = part("peers", "the overhead of other projects on the same workload")
    peers.add_argument("--only", nargs="+", metavar="NAME", help="only these; default all")
    peers.add_argument("--sizes", nargs="+", type=int, metavar="N", help="default 100 1000")
    number(peers, "--rounds", 3, "report the median of N rounds")
    peers.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="folder of their virtual environments; default in ~/.cache",
    )
    number(peers, "--install-s", 600, "seconds allowed for installing a project")
    other = part("simulate", "a run under other settings, in virtual time")
    other.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    other.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    other.add_argument(
        "--trace",
        type=Path,
        metavar="RUN",
        action="append",
        help="folder of a run recorded by benchmarks.parts.timings; default: the run folder of "
        "CONFIG. Repeat the option to add runs with other settings to the fit",
    )
    number(other, "--steps", 20, "updates")
    return parser.parse_args(argv)


def is_alone(options: argparse.Namespace) -> bool:
    """Return whether only the figures are printed (`--json -`)."""
    return str(options.json) == "-"


def check_target(file: Path) -> None:
    """Raise ConfigError if `file` cannot be written. An existing file is not changed."""
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--json {file}: no such folder")
    is_new = not os.path.lexists(file)
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"--json {file}: {error.strerror}; name a file that can be written"
        ) from error
    if is_new:
        file.unlink()


def reporter_of(options: argparse.Namespace, view: View) -> Reporter:
    """Return the function that reports the progress of a part."""
    return (lambda text: None) if is_alone(options) else view.log


def report_figures(options: argparse.Namespace, figures: Any, show: Callable[[], None]) -> None:
    """Print only the figures as JSON, or call `show` and write the JSON to the file, if any."""
    text = json.dumps(figures, indent=1) + "\n"
    if is_alone(options):
        sys.stdout.write(text)
        return
    show()
    if options.json:
        options.json.write_text(text, encoding="utf-8")


def head(title: str, names: Iterable[str]) -> Table:
    """Return an empty table with these columns."""
    table = Table(title=title, title_justify="left", box=None)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")  # names may wrap, figures may not
    return table


def run_learner(options: argparse.Namespace, view: View) -> int:
    """Compare trees with flat layouts."""
    from benchmarks.parts import layouts  # loads torch

    report = reporter_of(options, view)
    figures, tables = layouts.run(options.shapes, options.repeats, options.dense, report)

    def show() -> None:
        for table in tables:
            view.console.print(table)

    report_figures(options, figures, show)
    return 0


def run_server(options: argparse.Namespace, view: View) -> int:
    """Measure the cost of a token in the API server."""
    from benchmarks.parts import server_cost

    lengths = sorted(set(options.lengths or server_cost.LENGTHS))
    found = server_cost.run(
        lengths, options.rounds, options.engine, options.python, reporter_of(options, view)
    )

    def show() -> None:
        title = f"CPU of the API server of {options.engine} (its engine), us per sampled token"
        columns = ["request", *(f"turns of {n}" for n in lengths), "us_a_turn", "us_a_token"]
        table = head(title, columns)
        for form, costs in found.costs.items():
            cells = (f"{costs[n].server_us:.0f} ({costs[n].engine_us:.0f})" for n in lengths)
            table.add_row(form, *cells, f"{found.turn_us[form]:.0f}", f"{found.token_us[form]:.0f}")
        view.console.print(table)

    report_figures(options, msgspec.to_builtins(found, str_keys=True), show)
    return 0


def run_overhead(options: argparse.Namespace, view: View) -> int:
    """Measure the CPU, lag and memory of the controller."""
    from benchmarks.parts import overhead

    sizes = options.sizes or list(overhead.SIZES)
    if unknown := set(sizes) - set(overhead.SIZES):
        raise ConfigError(f"--sizes: unknown {unknown}; expected: {list(overhead.SIZES)}")
    found = overhead.run(sizes, options.workers)

    def show() -> None:
        names = next(iter(found.values()))
        table = head("the controller, by concurrent rollouts", ["rollouts", *names])
        for size, figures in found.items():
            table.add_row(size, *map(str, figures.values()))
        view.console.print(table)

    report_figures(options, found, show)
    return 0


def run_capture(options: argparse.Namespace, view: View) -> int:
    """Measure the cost of a captured call."""
    from benchmarks.parts import captured

    if options.beside:
        return run_captures(options, view)
    found = captured.run(options.programs, options.calls)

    def show() -> None:
        table = head(f"a captured call, {options.programs} programs", asdict(found))
        table.add_row(*(f"{value:.0f}" for value in asdict(found).values()))
        view.console.print(table)

    report_figures(options, asdict(found), show)
    return 0


def run_captures(options: argparse.Namespace, view: View) -> int:
    """Compare the cost of a captured call with that of other projects."""
    from benchmarks.parts import captured
    from benchmarks.peers import captures
    from benchmarks.peers.contest import python_of, version_of
    from benchmarks.peers.environments import default_folder

    known = captures.peers()
    if unknown := set(options.beside) - set(known):
        raise ConfigError(f"--beside: unknown {', '.join(unknown)}; expected: {', '.join(known)}")
    costs: dict[str, list[float]] = {"ours": []}
    pythons: dict[str, tuple[str, Path]] = {}
    for name in options.beside:
        python = python_of(name, known[name], default_folder(), 1800, view.log)
        shown = f"{name} {version_of(known[name], python)}"
        pythons[shown], costs[shown] = (name, python), []
    with tempfile.TemporaryDirectory(prefix="agentenv-") as folder:
        work = captures.work_in(Path(folder), options.programs, options.calls)
        for _ in range(options.rounds):
            costs["ours"].append(captured.run(options.programs, options.calls).us_a_call)
            for shown, (name, python) in pythons.items():
                costs[shown].append(captures.us_a_call(python, known[name], work))

    def show() -> None:
        title = f"a captured call, {options.programs} programs"
        table = head(title, ["", "us per call", "rounds", "/ours"])
        for name, rounds in costs.items():
            ratio = median(one / own for one, own in zip(rounds, costs["ours"], strict=True))
            each = " ".join(f"{one:.0f}" for one in rounds)
            table.add_row(name, f"{median(rounds):.0f}", each, f"{ratio:.1f}")
        view.console.print(table)

    report_figures(options, costs, show)
    return 0


def run_env_server(options: argparse.Namespace, view: View) -> int:
    """Measure step times over the OpenEnv protocol."""
    from benchmarks.parts import env_server

    found = env_server.run(options.sizes or env_server.SIZES, options.steps)

    def show() -> None:
        names = env_server.Figures.__struct_fields__
        table = head("agentenv serve-env, all sessions at once", ["sessions", *names])
        for size, one in found.items():
            table.add_row(str(size), *(f"{value:.3g}" for value in asdict(one).values()))
        view.console.print(table)

    report_figures(options, msgspec.to_builtins(found, str_keys=True), show)
    return 0


def run_peers(options: argparse.Namespace, view: View) -> int:
    """Compare our figures with other projects. A project that fails is listed with its error."""
    from benchmarks.peers import contest
    from benchmarks.peers.environments import default_folder

    sizes = options.sizes or list(contest.SIZES)

    def keep(report: contest.Report) -> None:
        """Write the rounds so far, so that an interrupted contest keeps them."""
        if not is_alone(options):
            report_figures(options, msgspec.to_builtins(report), lambda: None)

    report = contest.run(
        options.only or list(contest.PEERS),
        sizes,
        options.rounds,
        options.folder or default_folder(),
        options.install_s,
        reporter_of(options, view),
        keep=keep,
    )

    def show() -> None:
        columns = ("", "cpu", "range", "floor", "children", "/floor", "/ours", "speed")
        for size in sizes:
            table = head(f"{size} concurrent rollouts: microseconds of CPU per env step", columns)
            for name, peer in report.peers.items():
                if (one := peer.sizes.get(str(size))) is not None:
                    table.add_row(
                        name,
                        f"{one.cpu_us:.0f}",
                        f"{one.cpu_us_min:.0f}-{one.cpu_us_max:.0f}",
                        f"{one.floor_us:.0f}",
                        f"{one.children_us:.0f}",
                        f"{one.times_floor:.1f}",
                        "" if one.times_ours is None else f"{one.times_ours:.1f}",
                        "" if one.speed is None else f"{one.speed:.2f}",
                    )
            view.console.print(table)
        view.log(
            "children: CPU of the processes that it started; /ours: CPU above the floor, relative "
            "to ours; speed: env steps per second, relative to a loop that only waits"
        )
        for name, peer in report.peers.items():
            view.log(f"{name}: {peer.error or peer.version}")

    report_figures(options, msgspec.to_builtins(report), show)
    return 0


def run_chaos(options: argparse.Namespace, view: View) -> int:
    """Measure runs in fault storms. Return 1 if anything was lost or trained twice, or if goodput
    was too low. A short storm is not checked for goodput."""
    from benchmarks.parts import chaos

    size = chaos.LONG if options.long else chaos.SHORT if options.short else chaos.Size()
    if options.seconds:
        size = msgspec.structs.replace(size, calm_s=options.seconds)
    storms = chaos.run(size, reporter_of(options, view), options.times)
    together: dict[str, Any] = asdict(chaos.together(storms))
    if len(storms) > 1:
        together["storms"] = list(map(asdict, storms))
    slow = [] if options.short else [one for one in storms if one.share < chaos.MIN_SHARE]

    def show() -> None:
        names = [name for name in chaos.Figures.__struct_fields__ if name not in ("ended", "wrong")]
        table = head("fault storms compared with a calm run", [*names, "share"])
        for one in storms:
            table.add_row(*(str(getattr(one, name)) for name in names), f"{one.share:.2f}")
        view.console.print(table)
        for one in storms:
            for line in one.wrong:
                view.fail(line)
        if slow:
            view.fail(f"less than {chaos.MIN_SHARE:g} of the calm goodput")

    report_figures(options, together, show)
    return int(bool(slow) or any(one.wrong for one in storms))


def run_simulation(options: argparse.Namespace, view: View) -> int:
    """Predict a run under its own settings and under other settings."""
    from agentenv.assembly.keys.rl import TrainConfig  # slow to load; --help needs no config
    from agentenv.base.config import load_config
    from benchmarks.parts.simulation import advice, fitted, recorded, simulate, together, variants
    from benchmarks.parts.timings import read_trace

    config = load_config(TrainConfig, options.config, options.overrides)
    folder = Path(config.run.dir) / (config.run.name or options.config.stem)
    traces = [read_trace(run) for run in options.trace or [folder]]
    trace, model = together(traces), fitted(*traces)
    found = {"recorded": recorded(traces[0])}
    for variant in variants(config, trace):
        found[variant.name] = simulate(config, trace, variant, options.steps, model)

    def show() -> None:
        title = f"{options.steps} steps in virtual time; recorded: the run of the trace"
        names = ("settings", "s/step", "idle", "stale", "tokens/s", "branches", "tools wait")
        table = head(title, names)
        for name, one in found.items():
            table.add_row(
                name,
                f"{one.step_s:.2f}",
                f"{one.idle_share:.0%}",
                f"{one.staleness:.2f}",
                f"{one.tokens_per_s:.0f}",
                f"{one.branches:.0f}" if one.branches else "",
                f"{one.tools_wait_s:.2f} s",
            )
        view.console.print(table)
        view.log(advice(config, found))

    rows = {name: asdict(one) for name, one in found.items()}
    report_figures(options, {"model": asdict(model), **rows}, show)
    return 0


RUNS: dict[str, Callable[[argparse.Namespace, View], int]] = {
    "learner": run_learner,
    "server": run_server,
    "overhead": run_overhead,
    "capture": run_capture,
    "env-server": run_env_server,
    "chaos": run_chaos,
    "peers": run_peers,
    "simulate": run_simulation,
}


if __name__ == "__main__":
    sys.exit(main())
