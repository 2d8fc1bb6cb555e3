"""What 8, 64 and 1,000 GPUs ask of the controller, by costs that were measured, on paper.

    python benchmarks/bench.py paper [--figures FILE] [--json FILE]

`resources` multiplies measured costs (COSTS, or those of a file of `bench.py all --json`) by the
work of a cluster (CLUSTER, which is assumed, not measured). Shares are of one: one core, one disk,
one connection. Above 0.7 a part is called full, since queues grow without bound at 1.

    worker     env steps and tokens of all rollouts, on event loops of a core each: what sharding
               over rollout workers divides
    central    what is left for the controller's own loop when rollouts grow in workers: feeder,
               queue, journal, what the learner is sent
    journal    bytes of finished trees, on a disk of `disk_mb_s`
    network    the same bytes from the workers and on to the learner, on the controller's connection
    sandbox    a call of the Python tool for each env step, on cores elsewhere; forks besides

`simulated` lets the real loop run under the virtual clock (simulation.py) with as many engines, for
the first two sizes: which share of what engines can sample comes out, with one rollout worker and
with as many as `resources` asks for. The work is made up: trees of 16 trajectories of four turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.config import load_config
from agentenv.errors import ConfigError, ForeignError
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.timings import Shape, StepTimes, Trace
from agentenv.untrusted import decode
from benchmarks.parts.simulation import ServiceModel, Variant, simulate

SIZES = (8, 64, 1000)
SIMULATED = (8, 64)
FULL = 0.7
CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.toml"
GROUP_SIZE, NUM_TURNS, NUM_STEPS = 16, 4, 4
SLOTS = 64  # of an engine
PROMPT_TOKENS = 200


class Costs(Struct, frozen=True, kw_only=True):
    """Measured; microseconds of CPU. Two virtual cores that others shared, November 2026."""

    env_step_us: float = 315.0  # `overhead`, above the floor, in the process where rollouts grow
    central_us: float = 83.0  # `overhead --workers 2`, above the floor
    client_us: float = 24.0  # `engines`: a token, ten at a time
    frame_bytes: float = 18.5  # `transport`: a sampled token of a finished tree
    learner_bytes: float = 28.1
    call_s: float = 1 / 1100  # `tools`: of a core, a call of the Python sandbox
    fork_s: float = 0.020  # `fork`: of a session
    fork_share: float = 0.25  # assumed: of env steps


class Cluster(Struct, frozen=True, kw_only=True):
    """Assumed, of a model of 7 billion parameters: an engine of one GPU, half of the GPUs."""

    engine_share: float = 0.5
    tokens_per_s: float = 2500.0  # that an engine samples, with SLOTS turns at once
    turn_tokens: int = 300
    result_tokens: int = 300
    disk_mb_s: float = 500.0
    network_mb_s: float = 1250.0  # 10 Gbit/s
    weights_gb: float = 14.0
    step_s: float = 60.0


COSTS, CLUSTER = Costs(), Cluster()


class Asked(Struct, frozen=True, kw_only=True):
    """Of one size; see the shares above. `first_full` is what of one process is full first, with
    all rollouts in the controller; `workers` are needed so that none of their loops is."""

    tokens_per_s: float
    env_steps_per_s: float
    worker_share: float
    central_share: float
    journal_share: float
    network_share: float
    sandbox_share: float
    workers: int
    sandbox_cores: int
    publish_gb_s: float
    first_full: str


class Simulated(Struct, frozen=True, kw_only=True):
    """Of one size and number of workers."""

    engines: int
    workers: int
    step_s: float
    learner_idle: float
    of_engines: float  # tokens sampled, over what the engines could


def run(
    figures: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> dict[str, dict[str, Any]]:
    """`resources` and `simulated`. Raises ConfigError for a file without the costs."""
    costs = COSTS if figures is None else read_costs(figures)
    asked = {gpus: resources(gpus, costs) for gpus in SIZES}
    simulated = {}
    for gpus in SIMULATED:
        for workers in sorted({1, asked[gpus].workers}):
            name = f"{gpus} GPUs, {workers} worker{'s' * (workers > 1)}"
            say(f"simulated: {name}")
            simulated[name] = _simulated(gpus, workers, costs)
    return {
        "resources": {f"{gpus} GPUs": one for gpus, one in asked.items()},
        "simulated": simulated,
    }


def read_costs(file: Path) -> Costs:
    """Those that `bench.py all --json` measured; what a file has no figure of stays as it is."""
    try:
        parts = decode(file.read_bytes())["parts"]
        found = {name: one["figures"] for name, one in parts.items() if "figures" in one}
        costs = COSTS
        for part, cost in (("overhead", "env_step_us"), ("overhead-workers", "central_us")):
            if part in found:
                row = found[part]["1000"]
                costs = replace(costs, **{cost: row["cpu_us_per_env_step"] - row["floor_us"]})
        if "engines" in found:
            costs = replace(costs, client_us=found["engines"]["pool, 10 at a time"]["us_per_token"])
        if "transport" in found:
            rows = found["transport"]
            costs = replace(
                costs,
                frame_bytes=rows["frame"]["bytes_a_token"],
                learner_bytes=rows["learner"]["bytes_a_token"],
            )
        if "tools" in found:
            rate = found["tools"]["python, one after the other"]["calls_per_s"]
            costs = replace(costs, call_s=1 / rate)
        if "fork" in found:
            costs = replace(costs, fork_s=found["fork"]["sandbox, 16 MB"]["median_ms"] / 1e3)
    except (OSError, ForeignError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"--figures {file}: not what `bench.py all --json FILE` writes ({error!r})"
        ) from error
    return costs


def resources(gpus: int, costs: Costs = COSTS, cluster: Cluster = CLUSTER) -> Asked:
    """What so many GPUs ask for."""
    tokens = gpus * cluster.engine_share * cluster.tokens_per_s
    steps = tokens / cluster.turn_tokens
    worker = (steps * costs.env_step_us + tokens * costs.client_us) / 1e6
    sent = tokens * costs.frame_bytes / 1e6
    shares = {
        "worker": worker,
        "central": steps * costs.central_us / 1e6,
        "journal": sent / cluster.disk_mb_s,
        "network": (sent + tokens * costs.learner_bytes / 1e6) / cluster.network_mb_s,
    }
    sandbox = steps * (costs.call_s + costs.fork_share * costs.fork_s)
    first = max(shares, key=lambda name: shares[name])
    return Asked(
        tokens_per_s=round(tokens),
        env_steps_per_s=round(steps, 1),
        **{f"{name}_share": round(share, 4) for name, share in shares.items()},
        sandbox_share=round(sandbox, 3),
        workers=max(1, math.ceil(worker / FULL)),
        sandbox_cores=max(1, math.ceil(sandbox / FULL)),
        publish_gb_s=round(gpus * cluster.engine_share * cluster.weights_gb / cluster.step_s, 2),
        first_full=first if shares[first] > FULL else "none",
    )


def _simulated(gpus: int, workers: int, costs: Costs, cluster: Cluster = CLUSTER) -> Simulated:
    """The real loop, on as many engines, with a learner that keeps up with them."""
    engines = max(1, int(gpus * cluster.engine_share))
    prompts = engines * SLOTS // GROUP_SIZE
    rate = engines * cluster.tokens_per_s
    turn_s = (costs.env_step_us + cluster.turn_tokens * costs.client_us) / 1e6
    model = ServiceModel(
        decode_s=SLOTS / cluster.tokens_per_s,
        running_s=0.0,
        prefill_s=0.0,
        beside=1.0,
        update_s=0.0,
        token_s=1 / (1.2 * rate),
        shared=1.0,
        publish_s=2.0,
        score_s=0.5,
        turn_s=turn_s,
        env_s=0.05,
        tree_s=costs.central_us * GROUP_SIZE * NUM_TURNS / 1e6,
    )
    config = load_config(
        TrainConfig,
        CONFIG,
        [
            "algorithm.name=grpo",
            f"algorithm.group_size={GROUP_SIZE}",
            f"queue.groups_per_step={prompts}",
            f"learner.groups_per_minibatch={prompts}",
            "limits.max_turn_tokens=100000",
            "limits.max_response_tokens=1000000",
            "limits.max_seconds=1e6",
            "limits.max_turns=100",
            "limits.max_tool_calls=100",
            "limits.max_tool_result_tokens=100000",
            "limits.max_prompt_tokens=100000",
            "cluster.kind=processes",
            f"cluster.workers={workers}",
        ],
        say=lambda text: None,  # of keys that are ARPO's
    )
    variant = Variant(name=f"{gpus}", num_engines=engines)
    found = simulate(config, _trace(prompts, cluster), variant, NUM_STEPS, model)
    return Simulated(
        engines=engines,
        workers=workers,
        step_s=round(found.step_s, 1),
        learner_idle=round(found.idle_share, 3),
        of_engines=round(found.tokens_per_s / rate, 3),
    )


def _trace(num_trees: int, cluster: Cluster) -> Trace:
    """Trees as they were recorded: turns of half to one and a half times the mean."""
    step = StepTimes(
        wait_s=0.0,
        update_s=0.0,
        publish_s=0.0,
        parity_s=0.0,
        rest_s=0.0,
        loop_s=0.0,
        branch_s=0.0,
        busy=0.0,
        num_steps=1.0,
        num_tokens=1.0,
        num_proximal_tokens=0.0,
        staleness=0.0,
        turns=[],
        trees=[_tree(number, cluster) for number in range(min(num_trees, 64))],
    )
    return Trace(150_000, 1, [step, step])


def _tree(number: int, cluster: Cluster) -> list[Shape]:
    shapes = [Shape(-1, 0, PROMPT_TOKENS, [], [], 0.0, "")]
    for leaf in range(GROUP_SIZE):
        parent = 0
        for turn in range(NUM_TURNS):
            place = (number * 7 + leaf * 5 + turn * 3) % 11 / 10  # 0 to 1, evenly
            size = int(cluster.turn_tokens * (0.5 + place))
            last = turn == NUM_TURNS - 1
            shapes.append(
                Shape(
                    parent,
                    size,
                    0 if last else cluster.result_tokens,
                    [],
                    [] if last else [("python", 1.0, 0.0)],
                    float(leaf % 2) if last else 0.0,
                    "terminated" if last else "",
                )
            )
            parent = len(shapes) - 1
    return shapes
