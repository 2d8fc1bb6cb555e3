// The answers of lab/viewing, as far as the page reads them.

export type Row = Record<string, unknown>;
export type Cell = string | number | boolean | null | number[];

export interface Status {
  is: "running" | "finished" | "stopped" | "elsewhere";
  holder: { pid: number; host: string; since: string } | null;
}

export interface EvaluationHead {
  id: string;
  name: string;
  folder: string;
  subject: Row;
  config: Row;
}

export interface Run {
  name: string;
  folder: string;
  is_run: boolean;
  config: Row | null;
  summary: Row | null;
  status: Status;
  checkpoints: string[];
  steps: number[];
  has_texts: boolean;
  evaluations: EvaluationHead[];
  exported?: { left_out: string[]; when: string };
}

export interface State {
  status: Status["is"];
  metrics: number;
  log: number;
  summary: number;
  trees: [number, number, number];
  evaluations: Record<string, number>;
}

export interface Metrics {
  from: number;
  epoch: number;
  rows: Row[];
  num_unreadable: number;
}

export interface Index {
  columns: string[];
  rows: Cell[][];
  cut_off: number[];
}

export interface TreeDetails {
  tree: number;
  damaged?: string;
  question: string;
  env: string;
  right: number;
  failures: Record<string, number>;
  calls: number;
  call_errors: number;
  tool_s: number;
  entropy: number | null;
  gap: number | null;
  changed: number;
}

export interface StepAnswer {
  step: number;
  policy_version: number;
  num_trees: number;
  is_whole: boolean;
  metrics: Record<string, number>;
  trees: TreeDetails[];
}

export interface Call {
  name: string;
  arguments?: unknown;
  ok?: boolean;
  error?: string | null;
  duration_s?: number;
  waited_s?: number;
  info?: Row;
}

type Nats = (number | null)[];

export interface Node {
  index: number;
  parent: number | null;
  continues: number | null;
  branch: string;
  end: "terminated" | "truncated" | "failed" | null;
  limit: string | null;
  error: string | null;
  num_forks: number | null;
  reward: number;
  info: Row;
  calls: Call[];
  noted: Record<string, number>;
  ids: number[];
  texts: string[];
  logprobs: Nats;
  proximal: Nats;
  learner: Nats;
  teacher: Nats;
  entropies: Nats;
  versions: [number, number, number][];
  observation: string;
  num_observed: number;
  adv_pos?: number;
  adv_neg?: number;
  weight?: number;
  return?: number | null;
  advantage?: number | null;
}

export interface Tree {
  step: number;
  learner_version: number;
  trees: number[];
  tree: number;
  fate: "trained" | "filtered" | "failed";
  why: string;
  has_texts: boolean;
  has_credit: boolean;
  has_learner: boolean;
  num_tokens: number;
  num_sampled: number;
  num_roots: number;
  num_forks: number;
  num_retries: number;
  num_retaken: number;
  policy_version: number;
  task: { id: string; env: string; kind: string; question: string; answers: string[]; metadata: Row };
  nodes: Node[];
}

export interface Estimate {
  value: number | null;
  low: number | null;
  high: number | null;
  num_questions: number;
}

export interface FiguresOf {
  num_questions: number;
  num_trajectories: number;
  num_failed: number;
  num_valid: number;
  failures: Record<string, number>;
  estimates: Record<string, Estimate>;
  pass_at: Record<string, Estimate>;
  majority_at: Record<string, Estimate>;
  spreads: Record<string, { mean: number; median: number; p95: number }>;
  truncations: Record<string, number>;
  tools: Record<string, { calls: number; errors: number }>;
  agreement: Record<string, number | null> | null;
  success_if_failed_wrong?: number;
  arpo_tool_productivity?: number | null;
  num_retries?: number;
  num_misformatted?: number;
  assist?: Record<string, number>;
}

export interface Summary {
  name: string;
  compat?: string;
  num_samples: number;
  average: number | null;
  overall: FiguresOf;
  groups: Record<string, Record<string, FiguresOf>>;
}

export interface EvaluationIndex extends EvaluationHead {
  columns: string[];
  chunk: number;
  rows: Cell[][];
  num_unreadable: number;
}

export interface EvalRow {
  dataset: string;
  task: string;
  sample: number;
  kind: string;
  env_id: string;
  question: string;
  answers: string[];
  metadata: Row;
  segments: Record<string, string>[];
  prediction: string;
  tool_calls: Call[];
  num_turns: number;
  prompt_tokens: number;
  action_tokens: number;
  tool_tokens: number;
  seconds: number;
  end: string;
  limit: string | null;
  error: string | null;
  reward: number;
  success: boolean;
  reason: string;
  parts: Record<string, number>;
  scores: Record<string, number>;
  abandoned: string[];
  policy_versions: number[];
}

export interface Difference {
  name: string;
  num_questions: number;
  first: number;
  second: number;
  difference: number;
  low: number | null;
  high: number | null;
  p: number;
  test: string;
}

/** Of the samples of some questions in one evaluation. */
export interface Failed {
  num_failed: number;
  num_samples: number;
  success_if_wrong: number;
}

export interface Comparison {
  num_questions: number;
  only_first: number;
  only_second: number;
  failed: number;
  sides: [Failed, Failed];
  success: [string, Difference][];
  others: Difference[];
  num_changed: number;
  changed: {
    set: string;
    task: string;
    kind: string;
    question: string;
    change: number;
    first: string;
    second: string;
  }[];
}
