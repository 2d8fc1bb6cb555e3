"""A user's mistake is refused with its place and a way out, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentenv.contract.engine import EngineConfig
from agentenv.launchers import sft, train
from tests.support.golden import Golden
from tests.support.warehouse import ROOT


class Silent(EngineConfig, frozen=True, kw_only=True, tag="silent", tag_field="name"):
    """An engine that declares nothing about its log-probs."""


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.replace("\n", " ")


CONFIGURATIONS = [
    "queue.max_stalenes=2", "algorithm.name=arop", "algorithm.name=apro", "algorithm.nam=grpo",
    "algorithm.budget_beta=2", "cluster.workers=2", "nothing.at.all=1", "env.tools=[{name=5}]",
    "engine={name='vllm', urls=['127.0.0.1:9']}", "grader.own={name='nowhere'}", "cluster.wrkrs=2",
    "train.num_steps=many", "engine.max_num_seqs=4", "queue.groups_per_step=many",
    "queue.groups_per_step=0", "queue.groups_per_step=3", "learner={}", "train.num_epochs=1.0",
    "sampling.train.top_p=0.9", "sampling.train.repetition_penalty=1.1",
    "sampling.train.temperature=0", "sampling.schedule=[[3,1.0],[1,0.5]]",
    "data.train=/nowhere/x.jsonl", "model.path=/nowhere", "env.module=nowhere", "env.module=my_evn",
    "env.module=agentenv.evns", "env.kwargs={size=3}",
    "env={id='agentenv/Quickstart-v0', kwargs={corpsu='kb.jsonl'}}",
    "env={id='agentenv/Quickstart-v0'}", "limits.max_response_tokens=100000",
    "data.prefix_starts={low=0.9}", "checkpoint.best_metric=dev/reward", "train.stop_at=0.9",
    "run.setup=nowhere:prepare", "run.dir=/dev/null/runs", "renderer.name=native",
    "renderer.style=hermes", "prompt.template=serch", "env.tools=[{name='stok'}]",
    "env.tools=[{name='stock', kwargs={a=1}}]", "env.tools=[{name='nowhere:tool'}]",
    "env.tools=[{name='tests.test_tool_limits:Slow', kwargs={speed=1}}]",
    "env.tools=[{name='tests.test_tool_limits:Anything'}]",
    "env.tools=[{name='tests.test_tool_limits:echo', kwargs={x=1}}]", "data.train=''",
    "data.mix=[{path='x'}]", "data={mix=[{path='x'}], max_samples=3}",
    "data={mix=[{path='x', wieght=2}]}", "data.columns.qestion=q", "data.overlong_prompt=drop",
    "eval.sets.a={path='x', compat='old'}", "limits.on_limit=stop", "nonsense", "model.path.sub=1",
    "eval.sets.a={path='x', evry=2}", "model={}",
]  # fmt: skip

QA = "env={id='agentenv/QAGrader-v0',%s}"
GRADERS = [
    "grader.kind=best", "grader.colour=1", "grader.pth=x.py",
    "grader.kind=exact grader.path=pyproject.toml", "grader.kind=exact grader.partial_credit=true",
    "grader.kind=exact grader.ordered=true", "grader.ordered=yes", "grader.compat=reference",
    "grader.kind=judge", "grader.kind=custom", "grader.kind=custom grader.path=missing.py",
    "grader.kind=combined", "grader.kind=exact grader.combined.a={}", "grader.combined.a.kind=own",
    "grader.combined.a.kind=combined", "grader.combined.a.wieght=1",
    "grader.combined.a={} grader.math=false", f"{QA % 'kwargs={grader={}}'} grader={{}}",
    QA % "kwargs={search={}}", QA % "variants={a={id='agentenv/QAGrader-v0',search={}}}",
    QA % "variants={a={id='agentenv/QAGrader-v0'}}", QA % "variants={a={id='agentenv/QAGradr-v0'}}",
]  # fmt: skip
KUBERNETES = "cluster.kind=kubernetes cluster.image=agentenv:1 cluster.claim=work"
SETTINGS = [  # of the quick start
    "cluster.kind=kubernetes",
    f"{KUBERNETES} run.dir=runs",
    f"{KUBERNETES} run.dir=/shared/runs cluster.claim=My_Claim",
    "cluster.kind=slurm cluster.time=soon",
    "cluster.kind=slurm cluster.workers=2 cluster.min_workers=3",
    "cluster.kind=ray cluster.nodes=2",
    "cluster.kind=slurm engine.name=vllm model.path=models/Qwen2.5-7B",
    "engine={name='vllm',urls=['http://a:1'],servers={}}",
    "engine.name=vllm engine.servers.num_server=2",
    "engine.name=vllm engine.servers={servers_per_gpu=3,gpu_memory_share=0.4}",
    "engine.name=vllm engine.servers={servers_per_gpu=2,tensor_parallel_size=2}",
    "engine.name=vllm engine.pool.max_retries=-1",
    "engine.name=vllm engine.max_num_seqs=4",
    "learner.optimizer=muon_adamw learner.zero_stage=1",
    "learner.offload=optimizer learner.zero_stage=0",
    "learner.offload=params learner.optimizer=adamw learner.zero_stage=2",
    "learner.deepspeed_config=ds.json learner.zero_stage=0",
    "learner.dtype=bfloat16 learner.zero_stage=0",
    "learner.launch=external",
    "learner.address=0.0.0.0:1",
    "learner.warmup_steps=1 learner.warmup_ratio=0.1",
    "learner.schedule=constant learner.min_lr_ratio=0.1",
    "learner.optimizer=adamw learner.zero_stage=2",
    "learner.optimizer=adamw learner.lora={r=4}",
    "learner.optimizer=adamw learner.zero_stage=1 sft.optimizer.optimizer=adamw "
    "self_critic={every=2,optimizer={optimizer='muon_adamw'}}",
    "algorithm.group=8",
    "algorithm.name=ppo",
    "algorithm.name=grpo algorithm.beam_size=2",
    "algorithm.clip_low=-0.1",
    "algorithm.truncated.turns=keep",
    "algorithm.initial_rollouts=0",
    "algorithm.reference_every=5",
    "algorithm.name=reinforce_pp algorithm.kl_reward=0.1",
    "algorithm.name=dapo algorithm.overlong_tokens=10",
    "algorithm.name=grpo algorithm.token_mask={low=1.5,high=2.0}",
    "sampling.train.top_k=0",
    "sampling.train.top_k=5000",
    "sampling.train.top_p=0.9",
    "sampling.train.top_k=20 engine.name=vllm",
    "sampling.schedule=[[0,1.2]] sampling.train.temperature=0.5",
    "sampling.schedule=[[0,1.0],[9,0.5]] engine={name='tests.commands.test_bad_input:Silent'}",
    "sampling.train.stop=['']",
    "temperature=0.5",
    "train.max_tool_calls=3",
    "learning_rat=1e-6",
    "learner.lr=1e-4",
    "wholly=1",
    "engine.name=scripted engine.dtype=float32",
    "train.num_steps=many train.num_steps=five",
    "algorithm.group_sice=3",
    "data.custom_cls.path=x",
    "cluster.kind=slurm cluster.script=/proc/none/job.sh",
    "cluster.kind=slurm cluster.script=/proc",
    "python.timeout_s=0",
    "python.limits.memory=1",
    "search.mode=summaries",
    "search.mode=summary",
    "search.max_result=3",
    "search.backend={name='bm25',url='x'}",
    "search.backend.name=google",
    "search.max_results=0",
    "algorithm.adv_estimator=grpo data.train_batch_size=128 actor_rollout_ref.rollout.n=16 "
    "++actor_rollout_ref.rollout.tools.tool_instances.search.params.cache_file=x.json "
    "critic.optim.lr=1e-5 ENABLE_DYNAMIC_ROLLOUTS=True actor_rollout_ref.actor.optim.lrr=1",
]
EIGHT = (
    "resources.colocated=true learner.num_ranks=8 engine.servers.num_servers=8 "
    "engine.servers.gpu_memory_share=0.7"
)
PLANS = [  # of four GPUs for servers and four for the learner
    "--gpu-memory 40", "learner.zero_stage=1", "learner.activation_checkpointing=false",
    "engine.servers.gpu_memory_share=0.15", "learner.num_ranks=5",
    "resources.learner_gpus=[0,1,2,9]", "resources.learner_gpus=[-1,0,1,2]",
    "resources.learner_gpus=[0,1]", "--gpus 0 resources.learner_gpus=[0,1,2,3]",
    "engine.servers.gpus=[0,1,2,3] resources.learner_gpus=[3,4,5,6]",
    "engine.servers.gpus=[0,1,2,3,4]", "learner.context_parallel=3",
    "learner.num_ranks=3 learner.context_parallel=3",
    "grader.judge={url='{role:judge}',model='judge'}", f"{EIGHT} resources.colocated=false",
    f"{EIGHT} learner.zero_stage=1 learner.activation_checkpointing=false",
    "resources.colocated=true engine.name=scripted",
    "resources.colocated=true engine.weights=broadcast",
    "resources.colocated=true engine.servers.gpu_memory_share=0.95",
    "resources.colocated=true engine={name='vllm',weights='ipc',urls=['http://127.0.0.1:1']}",
]  # fmt: skip
OF_VERL = """
[data]
train_files = 'a.parquet'
[algorithm]
adv_estimator = 'gae'
gamma = 1.0
[actor_rollout_ref.actor.optim]
lr = 1e-6
[trainer]
nnodes = 1
"""

A_GRADER = """
from agentenv import ToolEnv
from agentenv import Grade
class Lenient:
    {grade}
class Mine(ToolEnv):
    def __init__(self, task):
        super().__init__(task, tools=[], grader=Lenient())
"""
MODULES = {  # of environments
    "number": A_GRADER.format(grade="async def grade(self, *_): return 1.0"),
    "text": A_GRADER.format(grade="async def grade(self, *_): return Grade('1', True)"),
    "half": A_GRADER.format(grade="async def grade(self, *_): return Grade(1.0)"),
    "plain": A_GRADER.format(grade="def grade(self, *_): return Grade(1.0, True)"),
    "few": A_GRADER.format(grade="async def grade(self, task): return Grade(1.0, True)"),
    "unparsed": "class Mine(",
    "fails": "\n1 / 0",
    "making": "class Mine:\n  def __init__(self, task):\n    task.metadata['shop']",
}
USER = '{"role": "user", "content": "x"}'
ROWS = {
    "empty.jsonl": "", "no_question.jsonl": '{"question": "q", "answer": "a"}\n{"answer": "a"}\n',
    "no_answer.jsonl": '{"question": "q"}\n',
    "ground_truth.jsonl": '{"question": "q", "reward_model": {"ground_truth": ""}}',
    "number.jsonl": '{"question": 3, "answer": "a"}',
    "not_a_number.jsonl": '{"question": "q", "answer": NaN}',
    "empty_answer.jsonl": '{"question": "q", "answer": [""]}',
    "null_answers.jsonl": '{"question": "q", "answer": [null, NaN]}',
    "no_answers.jsonl": '{"question": "q", "answer": []}',
    "no_output.jsonl": '{"question": "q", "output": [{"provenance": []}]}',
    "object.jsonl": '{"question": "q", "answer": {"a": "b"}}',
    "kinds.jsonl": '{"question": "q", "answer": "a", "kind": ["k"]}',
    "assistant.jsonl": '{"prompt": [{"role": "assistant", "content": "x"}], "answer": "a"}',
    "users.jsonl": f'{{"prompt": [{", ".join([USER] * 2)}], "answer": "a"}}',
    "no_message.jsonl": '{"prompt": ["x"], "answer": "a"}',
    "no_json.jsonl": '{"question": "q", "answer": "a"}\n{"question": "q", "answer":}\n',
    "rows.txt": "?", "open.json": "{", "other.json": '{"query": "result"}',
    "squad.json": '{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "numbers.json": "[1]",
    "empty.csv": "", "columns.csv": "a,a\n1,2\n", "short.csv": "question,answer\nq,a\nq\n",
    "long.csv": "question,answer\nq,a,b\n", "quotes.csv": 'question,answer\n"q"x,a\n',
    "rows.parquet": "no parquet", "rows.arrow": "no arrow at all",
}  # fmt: skip
FILES = ["nowhere.toml", "configs/quikstart.toml", "configs/quickstart", "run.seed=1"]


@pytest.mark.golden("train")
def test_mistakes_in_a_training(
    warehouse: Path, tmp_path: Path, golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names its file, row, line or key, and leaves nothing that blocks the next attempt."""
    for override in CONFIGURATIONS:
        text = golden.run(train, warehouse, "run.name=bad", override, status=2)
        assert re.split(r"[=.{\[]", override)[0] in text, "it names the table"
    code = "env={id='agentenv/CodeInterpreter-v0', kwargs={python={interpretor='x'}}}"
    golden.run(train, warehouse, code, status=2)
    for name, rows in ROWS.items():
        path = tmp_path / name
        path.write_text(rows)
        text = golden.run(train, warehouse, "run.name=bad", f"data.train={path}", status=2)
        assert f"{path}" in text
    for name, source in MODULES.items():
        (warehouse.parent / f"{name}_env.py").write_text(source)
        told = golden.run(train, warehouse, f"env.id={name}_env:Mine", status=2)
        assert golden.run(train, warehouse, f"env.id={name}_env:Mine", "--dry-run", status=2)
        assert f"{name}_env" in told or "train-1" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    golden.run(train, warehouse, f"run.dir={tmp_path}", "run.name=mine", status=2)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "do not touch"
    golden.run(train, warehouse, "run.name=never", "--resume", status=2)
    assert not [*(warehouse.parent / "runs").glob("bad*")]
    monkeypatch.chdir(ROOT)
    for argument in FILES:
        golden.run(train, argument, status=2)


@pytest.mark.golden("train-settings")
def test_settings_that_cannot_work(warehouse: Path, golden: Golden, tmp_path: Path) -> None:
    for line in SETTINGS:
        keys = [f"run.dir={tmp_path}", *line.split()]
        golden.run(train, ROOT / "configs" / "quickstart.toml", *keys, "--dry-run", status=2)
    for line in GRADERS:
        golden.run(train, warehouse, "env.id=agentenv/QAGrader-v0", *line.split(), status=2)
    (tmp_path / "mine.py").write_text("def score(task, written, calls):\n    return 1 / 0\n")
    custom = ["grader.kind=custom", f"grader.path={tmp_path}/mine.py", "grader.name=score"]
    golden.run(train, warehouse, "env.id=agentenv/QAGrader-v0", *custom, status=2)
    for line in PLANS:
        keys = ["--gpus", "8", *line.split(), "--dry-run"]
        golden.run(train, ROOT / "configs" / "arpo_reasoning_7b.toml", *keys, status=2)
    for name, text in {"verl.toml": OF_VERL, "verl.yaml": "data:\n", "bad.toml": "x = \n"}.items():
        (tmp_path / name).write_text(text)
        golden.run(train, tmp_path / name, status=2)


def test_a_mistake_in_the_file_is_not_blamed_on_the_command_line(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(warehouse.read_text() + "\n[cluster]\nknd = 'local'\n")
    told = refused(capsys, train.main([str(path), "run.name=mine", "cluster.kind=local"]))
    assert f"{path}: cluster.knd: unknown" in told  # and not left out for the kind


def test_a_configuration_of_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, sft.main([str(ROOT / "configs" / "quickstart.toml")]))
    assert "key; known: ['checkpoint'" in told
    assert "to another command?" in told
