"""What the learner gains, what the controller costs, what faults and other settings do to a run.

    python benchmarks/bench.py learner [--json FILE] [--shapes NAME ...] [--repeats N] [--dense]
    python benchmarks/bench.py deal [--json FILE]
    python benchmarks/bench.py overhead [--json FILE] [--sizes N ...] [--workers N]
    python benchmarks/bench.py workers [--json FILE] [--kind processes | ray] [--most N] [--steps N]
    python benchmarks/bench.py load [--json FILE] [--faults NAME ...] [--scale S]
    python benchmarks/bench.py chaos [--json FILE] [--long | --short] [--times N] [--seconds S]
    python benchmarks/bench.py soak [--json FILE] [--minutes M]
    python benchmarks/bench.py makespan [--json FILE] [--seeds N]
    python benchmarks/bench.py staleness [--json FILE] [--seeds N] [--updates N]
    python benchmarks/bench.py concurrency [--json FILE]
    python benchmarks/bench.py transport | start | fork | tools [--json FILE] [--repeats N]
    python benchmarks/bench.py engines [--json FILE] [--repeats N]
    python benchmarks/bench.py lag [--json FILE]
    python benchmarks/bench.py paper [--json FILE] [--figures FILE]
    python benchmarks/bench.py all [--json FILE] [--plots DIR] [--parts NAME ...]
    python benchmarks/bench.py peers [--json FILE] [--only NAME ...] [--sizes N ...] [--rounds N]
    python benchmarks/bench.py simulate CONFIG [key.sub=value ...] [--trace RUN] [--steps N]

Each part is a file of benchmarks/parts/. `learner` measures what training trees as trees is worth,
`deal` how long ranks wait for each other (both layouts.py); `overhead` what the controller costs at
thousands of rollouts, `workers` how much faster rollouts grow in two rollout workers than in one
(scaling.py), `load` what sick, slow, full or lost engine servers do to a run (it fails if a
trajectory is lost), `chaos` what is left of a run in a storm of faults (it fails if a tree is lost
or trained twice), `soak` what its processes hold more and more of, `makespan` what a barrier costs
beside no barrier, with tools of long tails, `staleness` what its bound does to time, length and
success, beside rules that discard or wait, `concurrency` how near to the best fixed limit of
requests the pool's own comes (simulated), `transport` what a finished tree costs to send, `start`
how long a command takes to begin, `fork` and `tools` what forks and calls cost (sandboxes.py),
`engines` what a client of servers costs by the token, `lag` how late the loop is while tools give
5 MB, `simulate` what a run would be like under other settings, by the times of a recorded one
(simulation.py), `paper` what 8, 64 and 1,000 GPUs ask of a controller, by measured costs, `peers`
what other projects cost at the work of `overhead` (peers/contest.py; it installs them). `all` runs
the parts in a bounded size each, into one file, with pictures.
`--json -` prints the figures alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__":  # run by its path: the repository root is what holds the packages
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Threads that wait by spinning would be counted as work.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import msgspec
from msgspec.structs import asdict
from rich.table import Table

from agentenv.errors import AgentEnvError, ConfigError
from agentenv.pipelines.run.arguments import Parser
from agentenv.pipelines.run.tables import bare_table
from agentenv.pipelines.run.terminal import View

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status."""
    options = _parse(argv)
    view = View()
    try:
        if options.json and not is_alone(options):
            check_target(options.json)
        return RUNS.get(options.part, run_plain)(options, view)
    except (AgentEnvError, OSError) as error:
        view.fail(str(error))
        return 2


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="benchmarks/bench.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    learner = parts.add_parser("learner", help="trees against flat layouts")
    dealing = parts.add_parser("deal", help="idle ranks, on simulated trees")
    cost = parts.add_parser("overhead", help="CPU, lag and memory of the controller")
    cost.add_argument(
        "--sizes", nargs="+", type=int, metavar="N", help="rollouts at a time; default 1000 10000"
    )
    faults = parts.add_parser("load", help="a run on engine servers with faults")
    cost.add_argument(
        "--workers", type=int, default=1, metavar="N",
        help="rollout workers; default 1; 0: rollouts grow in the controller",
    )  # fmt: skip
    scaling = parts.add_parser("workers", help="two rollout workers beside one, and more simulated")
    scaling.add_argument(
        "--kind", choices=("processes", "ray"), default="processes", help="default %(default)s"
    )
    scaling.add_argument("--most", type=int, default=8, metavar="N", help="default %(default)s")
    scaling.add_argument("--steps", type=int, default=14, metavar="N", help="default %(default)s")
    scaling.add_argument("--prompts", type=int, default=8, metavar="N", help="default %(default)s")
    faults.add_argument(
        "--faults",
        nargs="+",
        metavar="NAME",
        help="those in benches/load.py; default all",
    )
    faults.add_argument(
        "--scale", type=float, metavar="S", help="what durations are multiplied by; default 0.1"
    )
    storm = parts.add_parser("chaos", help="a run in a fault storm, beside a calm one")
    form = storm.add_mutually_exclusive_group()
    form.add_argument("--long", action="store_true", help="20 minutes, vLLM servers on the CPU")
    form.add_argument("--short", action="store_true", help="seconds: whether it works at all")
    storm.add_argument("--times", type=int, default=1, metavar="N", help="storms; default 1")
    storm.add_argument(
        "--seconds", type=float, metavar="S", help="how long the calm run lasts; default 300"
    )
    long = parts.add_parser("soak", help="memory and descriptors of a long run")
    long.add_argument("--minutes", type=float, default=30.0, metavar="M", help="default 30")
    spans = parts.add_parser("makespan", help="rollouts with and without a barrier")
    spans.add_argument("--seeds", type=int, default=3, metavar="N", help="medians of N; default 3")
    sending = parts.add_parser("transport", help="bytes and time of trees that are sent")
    starting = parts.add_parser("start", help="how long a command takes to begin")
    forking = parts.add_parser("fork", help="forks of sandboxes, envs, trees and prompts")
    calling = parts.add_parser("tools", help="calls of the sandbox, and of a cached search")
    asking = parts.add_parser("engines", help="CPU of a client of engine servers")
    for part in (sending, starting, forking, calling, asking):
        part.add_argument("--repeats", type=int, default=5, metavar="N", help="medians of N")
    bounds = parts.add_parser("staleness", help="its bound, beside rules that discard or wait")
    bounds.add_argument("--seeds", type=int, default=3, metavar="N", help="medians of N; default 3")
    bounds.add_argument(
        "--updates", type=int, default=20, metavar="N",
        help="of the quick start at each bound; default 20, 0: only what is simulated",
    )  # fmt: skip
    finding = parts.add_parser("concurrency", help="the pool's limit of requests beside fixed ones")
    late = parts.add_parser("lag", help="lag of the event loop while tools give 5 MB")
    paper = parts.add_parser("paper", help="8, 64 and 1,000 GPUs, by measured costs")
    paper.add_argument(
        "--figures", type=Path, metavar="FILE",
        help="costs as `all --json` wrote them; default: those in the module",
    )  # fmt: skip
    everything = parts.add_parser("all", help="the parts in a bounded size each")
    everything.add_argument("--plots", type=Path, metavar="DIR", help="pictures of the main tables")
    everything.add_argument("--parts", nargs="+", metavar="NAME", help="only these; default all")
    beside = parts.add_parser("peers", help="the overhead of other projects at the same work")
    beside.add_argument("--only", nargs="+", metavar="NAME", help="only these; default all")
    beside.add_argument("--sizes", nargs="+", type=int, metavar="N", help="default 100 1000")
    beside.add_argument("--rounds", type=int, default=3, metavar="N", help="medians of N")
    beside.add_argument(
        "--folder", type=Path, metavar="DIR", help="of their environments; default in ~/.cache"
    )
    beside.add_argument(
        "--install-s", type=float, default=600.0, metavar="S",
        help="how long installing one may take; default %(default)s",
    )  # fmt: skip
    other = parts.add_parser("simulate", help="a run under other settings, in virtual time")
    other.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    other.add_argument("overrides", nargs="*", default=[], metavar="key.sub=value")
    other.add_argument(
        "--trace", type=Path, metavar="RUN", action="append",
        help="folder of a run with log.timings=true, by default that of CONFIG; given again: "
        "another run, with other settings, whose times count as well",
    )  # fmt: skip
    other.add_argument("--steps", type=int, default=20, metavar="N", help="default %(default)s")
    measured = (learner, dealing, cost, scaling, faults, storm, long, spans, sending, starting)
    added = (forking, calling, asking, bounds, finding, late, paper, everything, beside)
    for part in (*measured, other, *added):
        part.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    learner.add_argument("--shapes", nargs="+", metavar="NAME", help="only these; default all")
    learner.add_argument("--repeats", type=int, default=3, metavar="N", help="medians of N")
    learner.add_argument("--dense", action="store_true", help="also trees under a dense mask")
    return parser.parse_args(argv)


def is_alone(options: argparse.Namespace) -> bool:
    """Whether nothing but the figures is to be printed."""
    return str(options.json) == "-"


def check_target(file: Path) -> None:
    """Raises ConfigError for what figures cannot be written to; what is there stays as it is."""
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--json {file}: there is no such folder")
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


def say_of(options: argparse.Namespace, view: View) -> Say:
    """How a part tells how far it is."""
    return (lambda text: None) if is_alone(options) else view.say


def tell(options: argparse.Namespace, figures: Any, show: Callable[[], None]) -> None:
    """The figures alone to the output, as JSON; or shown, and as JSON in a file."""
    text = json.dumps(figures, indent=1) + "\n"
    if is_alone(options):
        sys.stdout.write(text)
        return
    show()
    if options.json:
        options.json.write_text(text, encoding="utf-8")


def head(title: str, names: Iterable[str]) -> Table:
    """A table of figures with these columns, without rows."""
    table = bare_table(title)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")  # names may wrap, no figure does
    return table


def show_all(view: View, tables: Iterable[Table]) -> None:
    """One below the other."""
    for table in tables:
        view.show(table)


def run_learner(options: argparse.Namespace, view: View) -> int:
    """Trees against flat layouts."""
    from benchmarks.parts import layouts  # loads torch

    say = say_of(options, view)
    figures, tables = layouts.run(options.shapes, options.repeats, options.dense, say)
    tell(options, figures, partial(show_all, view, tables))
    return 0


def run_deal(options: argparse.Namespace, view: View) -> int:
    """Idle ranks."""
    from benchmarks.parts import layouts

    figures, tables = layouts.run_deal()
    tell(options, figures, partial(show_all, view, tables))
    return 0


Rows = dict[str, Any]  # struct of figures by row


def _makespan(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import makespan

    return makespan.run(options.seeds)


def _staleness(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import staleness

    return staleness.run(options.seeds, options.updates, say)


def _concurrency(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import concurrency

    return concurrency.run()


def _transport(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import transport

    return transport.run(options.repeats)


def _start(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import start

    return start.run(options.repeats)


def _fork(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import sandboxes

    return sandboxes.run_fork(options.repeats)


def _tools(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import sandboxes

    return sandboxes.run_tools(options.repeats)


def _engines(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import engines

    return engines.run(options.repeats)


def _lag(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import lag

    return lag.run()


def _paper(options: argparse.Namespace, say: Say) -> Rows:
    from benchmarks.parts import paper

    return paper.run(options.figures, say)


MOST_COLUMNS = 8

# Parts whose figures are one row each of one struct: title, first column, what measures. Of one
# whose rows are of several kinds the rows stand below the name of their table.
PLAIN: dict[str, tuple[str, str, Callable[[argparse.Namespace, Say], Rows]]] = {
    "makespan": ("until the last batch is there, in virtual seconds", "workload", _makespan),
    "staleness": ("by the rule of what is trained, and its bound", "rule", _staleness),
    "concurrency": ("sampled tokens a second, simulated", "server", _concurrency),
    "transport": ("a finished tree, per sampled token", "form", _transport),
    "start": ("fresh processes", "command", _start),
    "fork": ("forks, in milliseconds", "of", _fork),
    "tools": ("calls of tools", "call", _tools),
    "engines": ("CPU of a client of engine servers", "client", _engines),
    "lag": ("lag of the event loop, by what a tool gives", "result", _lag),
    "paper": ("what a number of GPUs asks of the controller", "of", _paper),
}


def run_plain(options: argparse.Namespace, view: View) -> int:
    """A part of PLAIN as tables, or as JSON: to a file, or alone to the output."""
    title, column, measure = PLAIN[options.part]
    measured = measure(options, say_of(options, view))
    nested = any(isinstance(one, dict) for one in measured.values())
    tables = measured if nested else {"": measured}
    found = {
        name: {row: asdict(figures) for row, figures in rows.items()}
        for name, rows in tables.items()
    }

    def show() -> None:
        for name, rows in found.items():
            if rows:
                names, *lines = _lines(column, rows)
                table = head(f"{title}: {name}" if name else title, names)
                for line in lines:
                    table.add_row(*line)
                view.show(table)

    tell(options, found if nested else found[""], show)
    return 0


def _lines(column: str, rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A head and a line each row, or each figure where these are too many for a terminal."""
    names = [name.replace("_", " ") for name in next(iter(rows.values()))]
    lines = [[column, *names]]
    lines += [[row, *map(str, figures.values())] for row, figures in rows.items()]
    return lines if len(names) <= MOST_COLUMNS else list(map(list, zip(*lines, strict=True)))


def run_all(options: argparse.Namespace, view: View) -> int:
    """Each part in a process of its own, into one file. The exit status is 1 if one failed."""
    from benchmarks.parts import everything

    parts = _known("--parts", options.parts, everything.PARTS)
    say = say_of(options, view)
    found = everything.run(parts, say, None if is_alone(options) else options.json)
    if is_alone(options):
        tell(options, found, lambda: None)
    if options.plots:
        say(f"written to {options.plots}: {', '.join(everything.plot(found, options.plots))}")
    return int(any("error" in part for part in found["parts"].values()))


K = TypeVar("K")


def _known(option: str, asked: Sequence[K] | None, known: Collection[K]) -> list[K]:
    """What was asked for, or all. Raises ConfigError."""
    for one in asked or ():
        if one not in known:
            raise ConfigError(f"{option} {one}: expected of {', '.join(map(str, known))}")
    return list(asked or known)


def run_overhead(options: argparse.Namespace, view: View) -> int:
    """The controller's figures as a table, or as JSON: to a file, or alone to the output."""
    from benchmarks.parts import overhead

    sizes = _known("--sizes", options.sizes, overhead.SIZES)
    found = overhead.run(sizes, options.workers)

    def show() -> None:
        names = next(iter(found.values()))
        table = head("the controller, by rollouts at a time", ["rollouts", *names])
        for size, figures in found.items():
            table.add_row(size, *map(str, figures.values()))
        view.show(table)

    tell(options, found, show)
    return 0


def run_peers(options: argparse.Namespace, view: View) -> int:
    """Our figures and those of peers, likewise; those without stand below with their errors."""
    from benchmarks.peers import contest
    from benchmarks.peers.environments import default_folder

    sizes = options.sizes or list(contest.SIZES)

    def keep(report: contest.Report) -> None:
        """A contest that is cut off leaves its rounds."""
        if not is_alone(options):
            tell(options, msgspec.to_builtins(report), lambda: None)

    report = contest.run(
        options.only or list(contest.PEERS),
        sizes,
        options.rounds,
        options.folder or default_folder(),
        options.install_s,
        say_of(options, view),
        keep=keep,
    )

    def show() -> None:
        columns = ("", "cpu", "of rounds", "floor", "below it", "/floor", "/ours", "speed")
        for size in sizes:
            table = head(f"{size} rollouts at a time: microseconds of CPU an env step", columns)
            for name, peer in report.peers.items():
                if (one := peer.sizes.get(str(size))) is not None:
                    table.add_row(
                        *(name, f"{one.cpu_us:.0f}", f"{one.cpu_us_min:.0f}-{one.cpu_us_max:.0f}"),
                        *(f"{one.floor_us:.0f}", f"{one.children_us:.0f}"),
                        f"{one.times_floor:.1f}",
                        "" if one.times_ours is None else f"{one.times_ours:.1f}",
                        "" if one.speed is None else f"{one.speed:.2f}",
                    )
            view.show(table)
        view.say(
            "below it: of the processes that it started; /ours: what is above the floor, beside "
            "ours; speed: env steps a second, beside a loop that only waits"
        )
        for name, peer in report.peers.items():
            view.say(f"{name}: {peer.error or peer.version}")

    tell(options, msgspec.to_builtins(report), show)
    return 0


def run_workers(options: argparse.Namespace, view: View) -> int:
    """Seconds a step by number of workers, likewise."""
    from benchmarks.parts import scaling

    say = say_of(options, view)
    found = scaling.run(options.kind, options.most, options.steps, options.prompts, say)
    rows = list(map(asdict, found))

    def show() -> None:
        title = "seconds a step, and how many times as fast as with one worker"
        table = head(title, scaling.Figures.__struct_fields__)
        for row in rows:
            table.add_row(*("" if value is None else f"{value:g}" for value in row.values()))
        view.show(table)

    tell(options, rows, show)
    return 0


def run_load(options: argparse.Namespace, view: View) -> int:
    """Figures by fault, likewise. The exit status is 1 if anything was lost."""
    from benchmarks.parts import load

    size = load.Size(scale=options.scale or load.Size().scale)
    found = load.run(_known("--faults", options.faults, load.SCENARIOS), size)

    def show() -> None:
        title = f"a run on servers with faults; all durations are multiplied by {size.scale:g}"
        names = [name for name in load.Figures.__struct_fields__ if name != "told"]
        table = head(title, ["servers", *names])
        for fault, figures in found.items():
            table.add_row(fault, *(str(getattr(figures, name)) for name in names))
        view.show(table)
        for fault, figures in found.items():
            for line in figures.told:
                view.say(f"{fault}: {line}")

    tell(options, {"size": asdict(size), **{k: asdict(v) for k, v in found.items()}}, show)
    return int(any(figures.num_lost for figures in found.values()))


def run_chaos(options: argparse.Namespace, view: View) -> int:
    """The figures of fault storms, likewise. The exit status is 1 if anything was lost or trained
    twice, or if too little was trained; of a short one that says nothing."""
    from benchmarks.parts import chaos

    size = chaos.LONG if options.long else chaos.SHORT if options.short else chaos.Size()
    if options.seconds:
        size = msgspec.structs.replace(size, calm_s=options.seconds)
    storms = chaos.run(size, say_of(options, view), options.times)
    together: dict[str, Any] = asdict(chaos.together(storms))
    if len(storms) > 1:
        together["storms"] = list(map(asdict, storms))
    slow = [] if options.short else [one for one in storms if one.share < chaos.MIN_SHARE]

    def show() -> None:
        names = [name for name in chaos.Figures.__struct_fields__ if name not in ("ended", "wrong")]
        table = head("fault storms beside a calm run", [*names, "share"])
        for one in storms:
            table.add_row(*(str(getattr(one, name)) for name in names), f"{one.share:.2f}")
        view.show(table)
        for one in storms:
            for line in one.wrong:
                view.fail(line)
        if slow:
            view.fail(f"less than {chaos.MIN_SHARE:g} of the calm goodput")

    tell(options, together, show)
    return int(bool(slow) or any(one.wrong for one in storms))


def run_soak(options: argparse.Namespace, view: View) -> int:
    """What each process of a run held, and how it grew. The exit status is 1 if any grew."""
    from benchmarks.parts import soak

    found = soak.run(options.minutes * 60)
    grown = [name for name, figures in found.items() if figures.grows]

    def show() -> None:
        title = f"{options.minutes:g} minutes of a run; what grows an hour, in its second half"
        table = head(title, ["process", *soak.Held.__struct_fields__])
        for name, figures in found.items():
            table.add_row(name, *map(str, asdict(figures).values()))
        view.show(table)
        for name in grown:
            view.fail(f"{name} holds more and more")

    tell(options, {name: asdict(one) for name, one in found.items()}, show)
    return int(bool(grown))


def run_simulation(options: argparse.Namespace, view: View) -> int:
    """What the settings of a run, and others beside them, would give; likewise."""
    from agentenv.config import load_config
    from agentenv.pipelines.config.rl import TrainConfig  # slow to load, as --help need not be
    from agentenv.pipelines.run.timings import read_trace
    from benchmarks.parts.simulation import advice, fitted, recorded, simulate, together, variants

    config = load_config(TrainConfig, options.config, options.overrides)
    folder = Path(config.run.dir) / (config.run.name or options.config.stem)
    traces = [read_trace(run) for run in options.trace or [folder]]
    trace, model = together(traces), fitted(*traces)
    found = {"recorded": recorded(traces[0])}
    for variant in variants(config, trace):
        found[variant.name] = simulate(config, trace, variant, options.steps, model)

    def show() -> None:
        title = f"{options.steps} steps in virtual time; recorded: the run of the trace"
        names = ("settings", "s a step", "idle", "stale", "tokens/s", "branches", "tools wait")
        table = head(title, names)
        for name, one in found.items():
            table.add_row(
                *(name, f"{one.step_s:.2f}", f"{one.idle_share:.0%}", f"{one.staleness:.2f}"),
                *(f"{one.tokens_per_s:.0f}", f"{one.branches:.0f}" if one.branches else ""),
                f"{one.tools_wait_s:.2f} s",
            )
        view.show(table)
        view.say(advice(config, found))

    rows = {name: asdict(one) for name, one in found.items()}
    tell(options, {"model": asdict(model), **rows}, show)
    return 0


RUNS: dict[str, Callable[[argparse.Namespace, View], int]] = {
    "learner": run_learner,
    "deal": run_deal,
    "overhead": run_overhead,
    "workers": run_workers,
    "load": run_load,
    "chaos": run_chaos,
    "soak": run_soak,
    "peers": run_peers,
    "simulate": run_simulation,
    "all": run_all,
}


if __name__ == "__main__":
    sys.exit(main())
