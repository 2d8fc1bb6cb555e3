// The trees of a step, or of all: a table with filters, and a scatter.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { go, link } from "./route";
import { type Column, Table } from "./table";
import type { Cell, Index, Run, StepAnswer, TreeDetails } from "./types";
import { Absent, Card, Search, Select, Tag, type Answer, color, cx, num, plural, seconds, useAnswer, useWidth } from "./ui";

export interface Item {
  step: number;
  tree: number;
  task: string;
  kind: string;
  fate: string;
  why: string;
  rewards: number[];
  mean: number | null;
  spread: number | null;
  leaves: number;
  failed: number;
  truncated: number;
  roots: number;
  forks: number;
  tokens: number;
  sampled: number;
  version: number;
  staleness: number;
  changed: number; // forks that ended otherwise than the branch they left
  more?: TreeDetails;
}

export function itemsOf(index: Index): Item[] {
  return index.rows.map((row) => {
    const [step, tree, task, kind, fate, why, rewards, leaves, failed, truncated, roots, forks, tokens, sampled, version, staleness, changed] = row as [number, number, string, string, string, string, number[], number, number, number, number, number, number, number, number, number, number] & Cell[];
    const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
    const spread = mean === null ? null : Math.sqrt(rewards.reduce((a, b) => a + (b - mean) ** 2, 0) / rewards.length);
    return { step, tree, task, kind, fate, why, rewards, mean, spread, leaves, failed, truncated, roots, forks, tokens, sampled, version, staleness, changed };
  });
}

function Rewards(props: { rewards: number[] }) {
  const sorted = [...props.rewards].sort((a, b) => b - a).slice(0, 24);
  return (
    <span class="dots" title={props.rewards.map((one) => num(one, 2)).join(", ")}>
      {sorted.map((one, i) => (
        <i key={i} class={cx("dot", one > 0.5 ? "dot-good" : one > 0 ? "dot-some" : one < 0 ? "dot-bad" : "dot-none")} />
      ))}
    </span>
  );
}

const FATES: Record<string, string> = { trained: "good", filtered: "plain", failed: "bad" };

const BASE: Column<Item>[] = [
  { key: "step", title: "step", width: "56px", align: "right", cell: (one) => one.step, sort: (one) => one.step },
  { key: "tree", title: "tree", width: "64px", align: "right", about: "index in start order", cell: (one) => one.tree, sort: (one) => one.tree },
  { key: "fate", title: "fate", width: "84px", cell: (one) => <Tag kind={FATES[one.fate]} title={one.why}>{one.fate}</Tag>, sort: (one) => one.fate },
  { key: "kind", title: "kind", width: "84px", cell: (one) => one.kind, sort: (one) => one.kind },
  { key: "mean", title: "reward", width: "72px", align: "right", about: "mean return of its trajectories", cell: (one) => num(one.mean, 2), sort: (one) => one.mean },
  { key: "rewards", title: "returns", width: "132px", about: "one dot per trajectory", cell: (one) => <Rewards rewards={one.rewards} />, sort: (one) => one.spread },
  { key: "forks", title: "forks", width: "72px", align: "right", about: "and the number that changed the outcome", cell: (one) => (one.changed > 0 ? <>{one.forks} <span class="changed">({one.changed})</span></> : one.forks), sort: (one) => one.forks },
  { key: "tokens", title: "tokens", width: "74px", align: "right", about: "shared tokens counted once", cell: (one) => num(one.tokens), sort: (one) => one.tokens },
  { key: "staleness", title: "stale", width: "56px", align: "right", about: "learner version minus oldest version of a token", cell: (one) => one.staleness, sort: (one) => one.staleness },
  { key: "failed", title: "failed", width: "62px", align: "right", about: "trajectories ended by infrastructure failures", cell: (one) => one.failed || "", sort: (one) => one.failed },
];
const DETAILS: Column<Item>[] = [
  { key: "calls", title: "calls", width: "58px", align: "right", cell: (one) => (one.more ? `${one.more.calls}${one.more.call_errors ? ` (${one.more.call_errors}!)` : ""}` : ""), sort: (one) => one.more?.calls ?? null, about: "tool calls and errors" },
  { key: "entropy", title: "entropy", width: "74px", align: "right", about: "mean of the sampled tokens, nats", cell: (one) => num(one.more?.entropy), sort: (one) => one.more?.entropy ?? null },
  { key: "gap", title: "gap", width: "74px", align: "right", about: "mean log-prob difference of engine and learner, nats", cell: (one) => num(one.more?.gap), sort: (one) => one.more?.gap ?? null },
  { key: "question", title: "question", width: "minmax(220px, 1fr)", cell: (one) => one.more?.damaged ?? one.more?.question ?? "…", sort: (one) => one.more?.question ?? null },
];
const TASK: Column<Item> = { key: "task", title: "task", width: "minmax(160px, 1fr)", cell: (one) => one.task, sort: (one) => one.task };

const AXES: [string, string, (one: Item) => number | null][] = [
  ["mean", "reward, mean", (one) => one.mean],
  ["spread", "reward, spread", (one) => one.spread],
  ["tokens", "tokens", (one) => one.tokens],
  ["sampled", "sampled tokens", (one) => one.sampled],
  ["forks", "forks", (one) => one.forks],
  ["staleness", "staleness", (one) => one.staleness],
  ["failed", "failed trajectories", (one) => one.failed],
  ["tree", "start order", (one) => one.tree],
  ["step", "step", (one) => one.step],
  ["calls", "tool calls *", (one) => one.more?.calls ?? null],
  ["tool_s", "tool seconds *", (one) => one.more?.tool_s ?? null],
  ["entropy", "entropy *", (one) => one.more?.entropy ?? null],
  ["gap", "engine-learner gap *", (one) => one.more?.gap ?? null],
];

function Scatter(props: { items: Item[]; theme: string; one: boolean }) {
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [x, setX] = useState("tokens");
  const [y, setY] = useState("mean");
  const [near, setNear] = useState<Item | null>(null);
  const height = 250;
  const axes = AXES.filter((axis) => props.one || !axis[1].endsWith("*"));
  const value = (key: string) => (axes.find((axis) => axis[0] === key) ?? axes[0])?.[2] ?? (() => null);

  const placed = useMemo(() => {
    const points = props.items.flatMap((item) => {
      const [a, b] = [value(x)(item), value(y)(item)];
      return a === null || b === null ? [] : [{ item, a, b, at: 0, up: 0 }];
    });
    let [lowA, highA, lowB, highB] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const { a, b } of points) {
      lowA = Math.min(lowA, a);
      highA = Math.max(highA, a);
      lowB = Math.min(lowB, b);
      highB = Math.max(highB, b);
    }
    if (lowA === highA) [lowA, highA] = [lowA - 1, highA + 1];
    if (lowB === highB) [lowB, highB] = [lowB - 0.5, highB + 0.5];
    for (const point of points) {
      const shake = ((point.item.tree * 2654435761) % 1000) / 1000 - 0.5; // points that lie on each other part
      point.at = 46 + (width - 62) * ((point.a - lowA) / (highA - lowA));
      point.up = height - 30 - (height - 46) * ((point.b - lowB) / (highB - lowB)) + 5 * shake;
    }
    return { points, lowA, highA, lowB, highB };
  }, [props.items, x, y, width]);

  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context || width === 0) return;
    element.width = width * devicePixelRatio;
    element.height = height * devicePixelRatio;
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = color("--muted");
    context.strokeStyle = color("--line");
    context.strokeRect(40.5, 10.5, width - 50, height - 36);
    context.textAlign = "right";
    context.fillText(num(placed.highB, 2), 36, 20);
    context.fillText(num(placed.lowB, 2), 36, height - 28);
    context.fillText(num(placed.highA, 2), width - 10, height - 10);
    context.textAlign = "left";
    context.fillText(num(placed.lowA, 2), 42, height - 10);
    const colors: Record<string, string> = { trained: color("--good"), filtered: color("--muted"), failed: color("--bad") };
    context.globalAlpha = placed.points.length > 3000 ? 0.35 : 0.75;
    for (const { item, at, up } of placed.points) {
      context.fillStyle = colors[item.fate] ?? "";
      context.beginPath();
      context.arc(at, up, item === near ? 6 : placed.points.length > 3000 ? 2 : 3.5, 0, 7);
      context.fill();
    }
  }, [placed, width, near, props.theme]);

  const pointed = (event: PointerEvent) => {
    const area = (event.currentTarget as HTMLElement).getBoundingClientRect();
    let best: Item | null = null;
    let least = 200;
    for (const { item, at, up } of placed.points) {
      const distance = (at - (event.clientX - area.left)) ** 2 + (up - (event.clientY - area.top)) ** 2;
      if (distance < least) [best, least] = [item, distance];
    }
    setNear(best);
  };
  const options = axes.map((axis) => [axis[0], axis[1].replace(" *", "")] as [string, string]);
  return (
    <Card
      title="One point per tree"
      aside={
        <div class="row">
          <Select label="across" value={x} options={options} onChange={setX} />
          <Select label="up" value={y} options={options} onChange={setY} />
        </div>
      }
    >
      <div ref={box}>
        <canvas ref={canvas} class={cx("scatter", near && "clickable")} style={{ width: "100%", height: `${height}px` }} onPointerMove={pointed} onPointerLeave={() => setNear(null)} onClick={() => near && go(link(["trees", near.step, near.tree]))} role="img" aria-label="Scatter of trees; the table below has the same rows" />
      </div>
      <p class="small hint">
        {near ? `step ${near.step}, tree ${near.tree}: ${near.fate}${near.why && `, ${near.why}`}; reward ${num(near.mean, 2)}; ${plural(near.tokens, "token")}` : <span class="muted legend-line"><span class="legend"><i class="legend-good" /> trained</span><span class="legend"><i class="legend-muted" /> filtered</span><span class="legend"><i class="legend-bad" /> failed</span> Hover for details, click to open.</span>}
      </p>
    </Card>
  );
}

export function TreesPage(props: { run: Run; index: Answer<Index>; step: number | null; query: URLSearchParams; theme: string; version: unknown }) {
  const { run, step, query } = props;
  const details = useAnswer<StepAnswer>(step === null ? null : `steps/${step}`, {}, props.version);
  const text = query.get("q") ?? "";
  const found = useAnswer<{ trees: number[]; num_searched: number; num_trees: number }>(step !== null && text ? `steps/${step}/search` : null, { q: text });

  const set = (changed: Record<string, string>) => {
    const next = { ...Object.fromEntries(query), ...changed };
    go(link(step === null ? ["trees"] : ["trees", step], next), true);
  };
  const items = useMemo(() => {
    if (props.index.value === undefined) return [];
    const more = new Map((details.value?.trees ?? []).map((one) => [one.tree, one]));
    return itemsOf(props.index.value)
      .filter((one) => step === null || one.step === step)
      .map((one) => ({ ...one, changed: more.get(one.tree)?.changed ?? one.changed, more: more.get(one.tree) }));
  }, [props.index.value, details.value, step]);

  const filters = { fate: query.get("fate") ?? "", kind: query.get("kind") ?? "", env: query.get("env") ?? "", failure: query.get("failure") ?? "", forks: query.get("forks") ?? "", low: query.get("from") ?? "", high: query.get("to") ?? "" };
  const kinds = useMemo(() => [...new Set(items.map((one) => one.kind))].sort(), [items]);
  const envs = useMemo(() => [...new Set(items.flatMap((one) => (one.more ? [one.more.env] : [])))].sort(), [items]);
  const failures = useMemo(() => [...new Set(items.flatMap((one) => Object.keys(one.more?.failures ?? {})))].sort(), [items]);
  const shown = useMemo(() => {
    const trees = text && step !== null ? new Set(found.value?.trees ?? []) : null;
    const low = filters.low === "" ? -Infinity : Number(filters.low);
    const high = filters.high === "" ? Infinity : Number(filters.high);
    const wanted = text.toLowerCase();
    return items.filter(
      (one) =>
        (!filters.fate || one.fate === filters.fate) &&
        (!filters.kind || one.kind === filters.kind) &&
        (!filters.env || one.more?.env === filters.env) &&
        (!filters.failure || (filters.failure === "any" ? one.failed > 0 : filters.failure === "truncated" ? one.truncated > 0 : filters.failure in (one.more?.failures ?? {}))) &&
        (!filters.forks || (filters.forks === "some" ? one.forks > 0 : one.changed > 0)) &&
        ((filters.low === "" && filters.high === "") || (one.mean !== null && one.mean >= low && one.mean <= high)) &&
        (trees === null || trees.has(one.tree) || (found.error !== undefined && (one.more?.question ?? "").toLowerCase().includes(wanted))) &&
        (step !== null || !text || one.task.toLowerCase().includes(wanted)),
    );
  }, [items, found.value, found.error, text, step, ...Object.values(filters)]);
  const columns = step === null ? [...BASE, TASK] : [...BASE.slice(1), ...DETAILS];

  if (run.steps.length === 0)
    return <Absent>{run.status.is === "running" ? "No finished step yet: trees appear after the first step." : "No archived trees: archive.max_gb is 0."}</Absent>;
  const metrics = details.value?.metrics ?? {};
  const steps = [...run.steps].reverse();
  return (
    <>
      <div class="filters">
        <Select label="step" value={step === null ? "" : String(step)} options={[["", "all steps"], ...steps.map((one) => [String(one), `step ${one}`] as [string, string])]} onChange={(value) => go(link(value ? ["trees", value] : ["trees"], Object.fromEntries(query)))} />
        <Select label="fate" value={filters.fate} options={[["", "any"], ["trained", "trained"], ["filtered", "filtered"], ["failed", "failed"]]} onChange={(fate) => set({ fate })} />
        <Select label="kind" value={filters.kind} options={[["", "any"], ...kinds.map((one) => [one, one] as [string, string])]} onChange={(kind) => set({ kind })} />
        {step !== null && envs.length > 1 && <Select label="env" value={filters.env} options={[["", "any"], ...envs.map((one) => [one, one] as [string, string])]} onChange={(env) => set({ env })} />}
        <Select label="failure" value={filters.failure} options={[["", "any"], ["any", "some failed"], ["truncated", "some truncated"], ...failures.map((one) => [one, one] as [string, string])]} onChange={(failure) => set({ failure })} />
        <Select label="forks" value={filters.forks} options={[["", "any"], ["some", "with forks"], ["changed", "a fork changed the outcome"]]} onChange={(forks) => set({ forks })} />
        <label class="field field-short">
          <span>reward from</span>
          <input type="number" step="any" value={filters.low} onChange={(event) => set({ from: event.currentTarget.value })} />
        </label>
        <label class="field field-short">
          <span>to</span>
          <input type="number" step="any" value={filters.high} onChange={(event) => set({ to: event.currentTarget.value })} />
        </label>
        <Search label={step === null ? "task" : "text"} value={text} placeholder={step === null ? "part of the task id" : "in questions, answers and trajectories"} onChange={(q) => set({ q })} note={step !== null && text && <span class="muted">{found.value ? (found.value.num_searched < found.value.num_trees ? `first ${found.value.num_searched} trees` : "") : found.error ? "questions only" : "…"}</span>} />
      </div>
      {details.value && !details.value.is_whole && <Absent>The file of this step is cut off, or still being written: {items.length} of {details.value.num_trees} trees are there.</Absent>}
      {details.error && <Absent>{details.error}</Absent>}
      {props.index.error && <Absent>{props.index.error}</Absent>}
      {!!props.index.value?.cut_off.length && <Absent>The files of these steps are cut off or still being written, and trees are missing: {props.index.value.cut_off.join(", ")}.</Absent>}
      {step !== null && details.value && (
        <p class="small muted">
          policy version {details.value.policy_version}; reward {num(metrics["reward/mean"])}, success {num(metrics["reward/success"])}; {plural(metrics["rollout/trajectories"] ?? 0, "trajectory", "trajectories")}, {plural(metrics["rollout/tool_calls"] ?? 0, "tool call")}, mean {seconds(Object.entries(metrics).filter(([key]) => /^tool\/.*\/mean_s$/.test(key)).reduce((sum, [, one], _, all) => sum + one / all.length, 0))}
        </p>
      )}
      <Table label="Trees" columns={columns} rows={shown} href={(one) => link(["trees", one.step, one.tree])} rowKey={(one) => `${one.step}/${one.tree}`} />
      <Scatter items={shown} theme={props.theme} one={step !== null} />
    </>
  );
}
