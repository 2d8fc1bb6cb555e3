"""What a plan is made of: a machine, processes on it, and what does not fit."""

from __future__ import annotations

from msgspec import Struct, field

from launchers.planning.memory import GIB, CacheRoom, Memory


class Process(Struct, frozen=True):
    """One line of the plan: what is started `count` times, on which GPUs, and its memory."""

    name: str
    count: int
    gpus: list[str] = field(default_factory=list)
    model: str = ""
    memory: Memory = Memory()
    room: CacheRoom | None = None
    note: str = ""

    @property
    def main_bytes(self) -> float:
        """Main memory of all of them; without GPUs, all of it is there."""
        on_gpu = 0.0 if self.gpus else self.memory.gpu_bytes
        return self.count * (self.memory.host_bytes + on_gpu)


class Machine(Struct, frozen=True):
    """What the run is planned for. `main_bytes` of main memory, 0 where nobody knows; `told` is
    the machine in words."""

    num_gpus: int
    gpu_bytes: float
    main_bytes: float
    told: str


class Plan(Struct):
    """Processes, and why they cannot run; `missing` is what is not here yet."""

    machine: Machine
    processes: list[Process] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    serving: dict[str, float] = field(default_factory=dict)  # bytes by GPU, while rollouts run
    training: dict[str, float] = field(default_factory=dict)  # and while the learner trains

    @property
    def gpu_bytes(self) -> dict[str, float]:
        """The most that each GPU has to hold; both phases are one unless engine and learner are
        colocated."""
        return {gpu: max(self.serving[gpu], self.training[gpu]) for gpu in self.serving}

    @property
    def is_whole(self) -> bool:
        """Whether the memory of every process with a model is estimated."""
        return all(p.memory.gpu or p.memory.host for p in self.processes if p.model)

    def add(self, process: Process, *, serving: float, training: float) -> None:
        """With so many bytes on every GPU of the process in each phase."""
        self.processes.append(process)
        for gpu in process.gpus:
            self.serving[gpu] = self.serving.get(gpu, 0.0) + serving
            self.training[gpu] = self.training.get(gpu, 0.0) + training


def check_memory(plan: Plan) -> None:
    """Note as problems where a GPU or the main memory is too small."""
    _check_gpus(plan)
    _check_main_memory(plan)


def _check_gpus(plan: Plan) -> None:
    size = plan.machine.gpu_bytes
    for gpu, needed in sorted(plan.gpu_bytes.items()):
        if needed <= size:
            continue
        names = [process.name for process in plan.processes if gpu in process.gpus]
        advice = "lower learner.max_tokens_per_microbatch, raise learner.num_ranks or "
        advice += "learner.zero_stage, set learner.activation_checkpointing or learner.offload"
        plan.problems.append(
            f"GPU {gpu} needs {needed / GIB:.1f} of {size / GIB:.0f} GiB ({' and '.join(names)})"
            + (f"; {advice}" if "learner rank" in names else "")
        )
        return  # the others are alike


def _check_main_memory(plan: Plan) -> None:
    needed = sum(process.main_bytes for process in plan.processes)
    if plan.machine.main_bytes and needed > plan.machine.main_bytes:
        plan.problems.append(
            f"main memory: {needed / GIB:.1f} of {plan.machine.main_bytes / GIB:.1f} GiB are "
            "needed" + ("" if plan.machine.num_gpus else "; --gpus N plans for a machine with GPUs")
        )
