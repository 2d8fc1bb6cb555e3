// Colors of tokens, and their legends.

import type { Node, Tree } from "./types";
import { num } from "./ui";

export const MODES: [string, string, string][] = [
  ["entropy", "entropy", "entropy of the sampling distribution, nats"],
  ["advantage", "advantage", "advantages of the trajectories that share the token: positive, negative, or both"],
  ["gap", "learner − engine", "difference of the log-probs of learner and engine, nats"],
  ["teacher", "teacher − policy", "log-prob of the teacher less that of the policy that sampled the token, nats"],
  ["version", "policy version", "policy version whose weights sampled the token"],
  ["mask", "mask", "sampled and trained, sampled only, or observed"],
  ["probability", "probability", "probability of the token under the engine"],
  ["none", "nothing", ""],
];

export interface Scale {
  mode: string;
  most: number;
  tree: Tree;
}

const finite = (values: (number | null | undefined)[]): number[] => values.filter((one): one is number => typeof one === "number" && Number.isFinite(one));

function quantile(values: number[], share: number): number {
  if (values.length === 0) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
}

export type Reader = "learner" | "teacher";

/** Its log-prob less the engine's. */
export function gapOf(node: Node, i: number, reader: Reader = "learner"): number | null {
  const [own, engine] = [node[reader][i], node.logprobs[i]];
  return typeof own === "number" && typeof engine === "number" ? own - engine : null;
}

/** Whose gap a mode shows. */
const readerOf = (mode: string): Reader | null => (mode === "gap" ? "learner" : mode === "teacher" ? "teacher" : null);

export function versionOf(tree: Tree, node: Node, i: number): number {
  return node.versions.find(([, from, to]) => from <= i && i < to)?.[0] ?? tree.policy_version;
}

export function scaleOf(tree: Tree, mode: string): Scale {
  let most = 1;
  if (mode === "entropy") most = Math.max(0.1, quantile(tree.nodes.flatMap((node) => finite(node.entropies)), 0.98));
  if (mode === "advantage") most = Math.max(1e-6, ...tree.nodes.flatMap((node) => (node.ids.length ? shares(node).map(Math.abs) : [])));
  const reader = readerOf(mode);
  if (reader) most = Math.max(0.01, quantile(tree.nodes.flatMap((node) => node.ids.flatMap((_, i) => finite([gapOf(node, i, reader)]).map(Math.abs))), 0.98));
  return { mode, most, tree };
}

const level = (share: number, levels: number): number => Math.min(levels, Math.max(0, Math.round(share * levels)));

/** The class of a difference. */
function sized(gap: number | null, most: number): string {
  if (gap === null) return "unknown";
  const size = level(Math.abs(gap) / most, 4);
  return size === 0 ? "" : gap > 0 ? `p${size}` : `n${size}`;
}

/** The class of a sampled token. */
export function tone(scale: Scale, node: Node, i: number): string {
  const { mode, most, tree } = scale;
  if (mode === "entropy") {
    const entropy = node.entropies[i];
    return typeof entropy === "number" ? `h${level(entropy / most, 8)}` : "unknown";
  }
  if (mode === "advantage") return signs(node, most);
  const reader = readerOf(mode);
  if (reader) return sized(gapOf(node, i, reader), most);
  if (mode === "version") return `v${Math.min(7, Math.max(0, tree.learner_version - versionOf(tree, node, i)))}`;
  if (mode === "mask") return tree.fate === "trained" && (node.weight ?? 0) > 0 ? "m-trained" : "m-sampled";
  if (mode === "probability") {
    const logprob = node.logprobs[i];
    return typeof logprob === "number" ? `h${8 - level(Math.exp(logprob), 8)}` : "unknown";
  }
  return "";
}

/** Positive and negative advantage of a turn for each trajectory that shares it. */
function shares(node: Node): [number, number] {
  const weight = Math.max(1, node.weight ?? 1);
  return [(node.adv_pos ?? 0) / weight, (node.adv_neg ?? 0) / weight];
}

/** Of all tokens of a turn: positive, negative, or both signs at once. */
export function signs(node: Node, most: number): string {
  const [up, down] = shares(node);
  if (node.adv_pos === undefined) return "unknown";
  const [a, b] = [level(up / most, 4) || (up > 0 ? 1 : 0), level(-down / most, 4) || (down < 0 ? 1 : 0)];
  if (a && b) return `both b${Math.max(a, b)}`;
  return a ? `p${a}` : b ? `n${b}` : "";
}

/** The tone of a whole turn, for its box in the drawing. */
export function boxTone(scale: Scale, node: Node): string {
  const { mode, most } = scale;
  if (node.ids.length === 0) return "";
  const mean = (values: number[]) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  if (mode === "entropy") {
    const found = mean(finite(node.entropies));
    return found === null ? "unknown" : `h${level(found / most, 8)}`;
  }
  if (mode === "probability") {
    const found = mean(finite(node.logprobs).map(Math.exp));
    return found === null ? "unknown" : `h${8 - level(found, 8)}`;
  }
  const reader = readerOf(mode);
  if (reader) return sized(mean(finite(node.ids.map((_, i) => gapOf(node, i, reader)))), most);
  return tone(scale, node, node.ids.length - 1);
}

export function legendOf(scale: Scale): [string, string][] {
  const { mode, most, tree } = scale;
  switch (mode) {
    case "entropy":
      return [["h0", "0"], ["h4", num(most / 2, 2)], ["h8", `${num(most, 2)} nats and more`]];
    case "advantage":
      return [["p3", "more likely"], ["n3", "less likely"], ["both b3", "both: its trajectories disagree"]];
    case "gap":
    case "teacher":
      return [["n4", `${readerOf(mode)} ${num(most, 3)} nats below`], ["p4", "above"]];
    case "version": {
      const ages = [...new Set(tree.nodes.flatMap((node) => node.versions.map(([version]) => tree.learner_version - version)))].sort((a, b) => a - b);
      return ages.map((age) => [`v${Math.min(7, Math.max(0, age))}`, `version ${tree.learner_version - age}${age ? `, ${age} old` : ", the learner's own"}`]);
    }
    case "mask":
      return [["m-trained", "sampled and trained"], ["m-sampled", "sampled, not trained"], ["m-observed", "observed: never trained"]];
    case "probability":
      return [["h0", "1"], ["h4", "0.5"], ["h8", "0"]];
    default:
      return [];
  }
}

/** Positions in `a` that are not in the longest common subsequence with `b`. */
export function differing(a: number[], b: number[]): Set<number> {
  const found = new Set<number>();
  let from = 0;
  while (from < a.length && from < b.length && a[from] === b[from]) from++;
  let to = 0;
  while (to < a.length - from && to < b.length - from && a[a.length - 1 - to] === b[b.length - 1 - to]) to++;
  const [x, y] = [a.slice(from, a.length - to), b.slice(from, b.length - to)];
  if (x.length * y.length > 4_000_000 || y.length === 0) {
    x.forEach((_, i) => found.add(from + i));
    return found;
  }
  const width = y.length + 1;
  const table = new Uint16Array((x.length + 1) * width);
  const at = (i: number, j: number): number => table[i * width + j] ?? 0;
  for (let i = x.length - 1; i >= 0; i--)
    for (let j = y.length - 1; j >= 0; j--) table[i * width + j] = x[i] === y[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
  for (let i = 0, j = 0; i < x.length; ) {
    if (j < y.length && x[i] === y[j]) [i, j] = [i + 1, j + 1];
    else if (j < y.length && at(i, j + 1) >= at(i + 1, j)) j++;
    else found.add(from + i++);
  }
  return found;
}
