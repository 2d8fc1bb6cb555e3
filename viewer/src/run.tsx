// The run: its status, its curves, its time line.

import { useMemo, useState } from "preact/hooks";

import { Chart, type Series } from "./chart";
import { link } from "./route";
import { Timeline } from "./timeline";
import type { Row, Run } from "./types";
import { Absent, Card, Search, Tag, Tile, cx, num, percent, plural, useAnswer } from "./ui";

interface Panel {
  title: string;
  about?: string;
  keys: (string | RegExp)[];
  from?: number;
  to?: number;
  dashed?: RegExp;
}

const PANELS: Panel[] = [
  { title: "Reward and success of rollouts; failures dashed", about: "success of finished rollouts, and with failed ones as wrong", keys: ["reward/mean", "reward/success", "reward/success_if_failed_wrong", "failed/share"], dashed: /failed/ },
  { title: "Success by kind of question", keys: [/^by_kind\/.*\/success$/], from: 0, to: 1 },
  { title: "Staleness, versions", about: "learner version minus oldest version of a token, at training", keys: ["staleness/max", "staleness/trained_mean", "staleness/bound"], dashed: /bound/, from: 0 },
  { title: "Queue: trees", keys: ["queue/ready", "trees/in_flight"], from: 0 },
  { title: "Flow: trees since the start", about: "offered = trained + filtered + failed + in flight; equal: trained without signal", keys: ["trees/offered", "trees/trained", "trees/equal", "trees/filtered", "trees/failed"], from: 0 },
  { title: "Failed trajectories per step, by kind", keys: [/^failed\/by_kind\//], from: 0 },
  { title: "Tool calls per step; errors dashed", keys: [/^tool\/.*\/(calls|errors)$/], dashed: /errors/, from: 0 },
  { title: "Seconds per tool call; waiting dashed", keys: [/^tool\/.*\/(mean_s|waited_s)$/], dashed: /waited/, from: 0 },
  { title: "Cached answers: calls per step", keys: [/^tool\/.*\/cache_hits$/], from: 0 },
  { title: "Tokens per trajectory: offered, trained", keys: ["length/offered_p50", "length/trained_p50", "length/offered_p90", "length/trained_p90"], dashed: /trained/, from: 0 },
  { title: "Turns and calls per trajectory", keys: ["rollout/turns", "rollout/calls_per_trajectory"], from: 0 },
  { title: "Roots and forks per step", keys: ["rollout/roots", "rollout/forks"], from: 0 },
  { title: "Entropy of sampled tokens, nats", keys: ["rollout/entropy", "learner/entropy"] },
  { title: "Engine versus learner, nats", about: "the same weights and tokens", keys: ["parity/logprob_gap_mean", "parity/logprob_gap_max"], from: 0 },
  { title: "Loss", keys: ["learner/loss"] },
  { title: "Gradient norm", keys: ["learner/grad_norm"], from: 0 },
  { title: "KL, nats", keys: ["learner/kl_to_proximal", "learner/kl_to_reference"] },
  { title: "Shares of clipped tokens", keys: ["learner/clipped_high", "learner/clipped_low", "learner/importance_capped"], from: 0 },
  { title: "Sampled tokens per second", keys: ["time/sampled_tokens_per_s"], from: 0 },
  { title: "Prefix cache: share of cached prompt tokens", keys: ["prefix/turn_hits", "prefix/fork_hits"], from: 0, to: 1 },
  { title: "Truncated trajectories, by limit", keys: [/^(rollout\/truncated|truncated\/)/], from: 0 },
  { title: "Event loop: lag, ms", keys: ["event_loop/lag_p99_ms", "event_loop/lag_max_ms"], from: 0 },
];

/** The rows of updates; of a repeated step, the later row. */
export function updates(rows: Row[]): Row[] {
  const found = new Map<number, Row>();
  for (const row of rows) if ("trees/offered" in row) found.set(row["step"] as number, row);
  return [...found.values()].sort((a, b) => (a["step"] as number) - (b["step"] as number));
}

function keysOf(rows: Row[]): string[] {
  const found = new Set<string>();
  for (const row of rows) for (const key in row) if (typeof row[key] === "number") found.add(key);
  return [...found].sort();
}

const value = (row: Row, key: string): number | null => (typeof row[key] === "number" ? (row[key] as number) : null);

/** A key without the parts that all keys of a panel share. */
function shortened(keys: string[]): string[] {
  if (keys.length < 2) return keys;
  const parts = keys.map((key) => key.split("/"));
  let before = 0;
  while (parts.every((part) => part.length > before + 1 && part[before] === parts[0]?.[before])) before++;
  let behind = 0;
  while (parts.every((part) => part.length > before + behind + 1 && part.at(-1 - behind) === parts[0]?.at(-1 - behind))) behind++;
  return parts.map((part) => part.slice(before, part.length - behind).join(" "));
}

function Curves(props: { rows: Row[]; keys: string[]; panel: Panel; theme: string; wide?: boolean }) {
  const { rows, keys, panel } = props;
  const x = useMemo(() => rows.map((row) => row["step"] as number), [rows]);
  const series = useMemo<Series[]>(() => {
    const names = shortened(keys);
    return keys.map((key, i) => ({ label: names[i] ?? key, values: rows.map((row) => value(row, key)), dash: panel.dashed?.test(key) }));
  }, [rows, keys.join()]);
  return (
    <Card title={panel.title} class={cx("panel", props.wide && "panel-wide")}>
      <Chart x={x} series={series} from={panel.from} to={panel.to} theme={props.theme} />
      {panel.about && <p class="muted small">{panel.about}</p>}
    </Card>
  );
}

const PHASES: Record<string, string> = { before_sft: "start", after_sft: "cold start", after_rl: "end" };

/** Evaluations by update, with their intervals. */
function Evaluations(props: { rows: Row[]; theme: string }) {
  const [byKind, setByKind] = useState(false);
  const found = useMemo(() => {
    const rows = props.rows.filter((row) => Object.keys(row).some((key) => /^eval\/.*\/success$/.test(key)));
    const keys = keysOf(rows).filter((key) => /^eval\/.*\/success$/.test(key) && (byKind || key.split("/").length === 3));
    return { x: rows.map((_, i) => i), phases: rows.map((row) => PHASES[String(row["phase"])] ?? String(row["phase"] ?? `step ${String(row["step"])}`).replace(/^step-0*/, "step ")), keys, rows };
  }, [props.rows, byKind]);
  const series = useMemo<Series[]>(
    () =>
      found.keys.map((key) => ({
        label: key.replace(/^eval\//, "").replace(/\/success$/, "").replace("/", " · "),
        values: found.rows.map((row) => value(row, key)),
        low: key.split("/").length === 3 ? found.rows.map((row) => value(row, `${key}_low`)) : undefined,
        high: key.split("/").length === 3 ? found.rows.map((row) => value(row, `${key}_high`)) : undefined,
        dash: key.split("/").length > 3,
        points: true,
      })),
    [found],
  );
  if (found.rows.length === 0) return null;
  const aside = (
    <label class="check">
      <input type="checkbox" checked={byKind} onChange={(event) => setByKind(event.currentTarget.checked)} /> by kind
    </label>
  );
  return (
    <Card title="Success in evaluations, 95 % interval" aside={aside} class="panel panel-wide">
      <Chart x={found.x} series={series} from={0} to={1} theme={props.theme} height={230} xLabel="evaluation" labels={found.phases} />
    </Card>
  );
}

function last(rows: Row[], key: string): unknown {
  for (let i = rows.length - 1; i >= 0; i--) if (typeof rows[i]?.[key] === "number") return rows[i]?.[key];
  return undefined;
}

function path(row: Row | null, ...keys: string[]): unknown {
  let found: unknown = row;
  for (const key of keys) found = typeof found === "object" && found !== null ? (found as Row)[key] : undefined;
  return found;
}

/** Note of a success: the share of failed trajectories, which it excludes. */
function share(failed: unknown): string | undefined {
  return typeof failed === "number" && failed > 0 ? `${percent(failed)} failed` : undefined;
}

function failedOf(row: Row | undefined, key: string): string {
  const place = key.replace(/success$/, "");
  const num_failed = Number(row?.[`${place}failed`] ?? 0);
  const done = Number(row?.[`${place}trajectories`] ?? 0);
  return num_failed > 0 ? `, ${percent(num_failed / (num_failed + done))} failed` : "";
}

function leastOf(row: Row | undefined, key: string): string | undefined {
  const least = row?.[key.replace(/success$/, "success_if_failed_wrong")];
  return typeof least === "number" && failedOf(row, key) !== "" ? `with failed ones as wrong: ${percent(least)}` : undefined;
}

/** Sampled tokens per second over all steps, for a run without this metric. */
function rateOf(steps: Row[]): number | undefined {
  const rows = steps.filter((row) => Number(row["time/sampled_tokens_per_s"] ?? 0) > 0);
  const tokens = rows.reduce((sum, row) => sum + Number(row["rollout/sampled_tokens"] ?? 0), 0);
  const seconds = rows.reduce((sum, row) => sum + Number(row["rollout/sampled_tokens"] ?? 0) / Number(row["time/sampled_tokens_per_s"]), 0);
  return seconds > 0 ? tokens / seconds : undefined;
}

function Tiles(props: { run: Run; rows: Row[]; steps: Row[] }) {
  const { run, rows, steps } = props;
  const planned = path(run.config, "train", "num_steps");
  const done = steps.at(-1)?.["step"] ?? 0;
  const evaluated = rows.filter((row) => Object.keys(row).some((key) => /^eval\/[^/]+\/success$/.test(key)));
  const key = Object.keys(evaluated[0] ?? {}).find((one) => /^eval\/[^/]+\/success$/.test(one)) ?? "";
  const first = evaluated.find((row) => key in row);
  const latest = [...evaluated].reverse().find((row) => key in row);
  const lost = failedOf(latest, key);
  const failed = steps.reduce((sum, row) => sum + Number(row["failed/trajectories"] ?? 0), 0);
  const trajectories = steps.reduce((sum, row) => sum + Number(row["rollout/trajectories"] ?? 0), 0);
  const offered = Number(last(steps, "trees/offered") ?? 0);
  return (
    <div class="tiles">
      <Tile name="updates" note={typeof planned === "number" ? `of ${num(planned)}` : undefined}>
        {num(done)}
      </Tile>
      {latest !== undefined && (
        <Tile name={`success, ${key.split("/")[1]}`} note={latest !== first && first !== undefined ? `from ${percent(value(first, key))}${lost}` : lost.slice(2) || undefined} title={leastOf(latest, key)}>
          {percent(value(latest, key))}
        </Tile>
      )}
      <Tile name="reward, last step">{num(last(steps, "reward/mean"))}</Tile>
      <Tile name="training success, last step" note={share(last(steps, "failed/share"))} title="of finished trajectories">
        {percent(last(steps, "reward/success") as number | undefined)}
      </Tile>
      <Tile name="staleness, most" note={`bound ${num(last(steps, "staleness/bound"))}`}>
        {num(steps.reduce((most, row) => Math.max(most, Number(row["staleness/max"] ?? 0)), 0))}
      </Tile>
      <Tile name="trees trained" note={`of ${num(offered)}; ${num(Number(last(steps, "trees/equal") ?? 0) + Number(last(steps, "trees/filtered") ?? 0))} without signal`}>
        {num(last(steps, "trees/trained") ?? 0)}
      </Tile>
      <Tile name="failed trajectories" note={trajectories ? `${percent(failed / (failed + trajectories))} of all` : undefined}>
        {num(failed)}
      </Tile>
      <Tile name="engine versus learner" note="mean difference, nats" title="log-probs of the same tokens under the same weights">
        {num(last(steps, "parity/logprob_gap_mean"))}
      </Tile>
      {last(steps, "handover/total_s") !== undefined && (
        <Tile name="hand-over, last step" note="seconds per update" title="engine and learner pass weights and GPUs to each other: sleep, wake, publish, load">
          {num(last(steps, "handover/total_s"))}
        </Tile>
      )}
      <Tile name="tokens per second" note="over the run" title="sampled tokens of all steps per second of the RL phase">
        {num(last(steps, "time/run_tokens_per_s") ?? rateOf(steps))}
      </Tile>
    </div>
  );
}

/** Show the end of a text at first; later the reader's scroll position stays. */
function toEnd(element: HTMLElement | null) {
  if (element && element.textContent && !element.dataset.shown) {
    element.scrollTop = element.scrollHeight;
    element.dataset.shown = "yes";
  }
}

export function RunPage(props: { run: Run; rows: Row[]; unreadable: number; theme: string; version: number }) {
  const { run, rows, theme } = props;
  const [wanted, setWanted] = useState("");
  const steps = useMemo(() => updates(rows), [rows]);
  const keys = useMemo(() => keysOf(steps), [steps]);
  const log = useAnswer<{ text: string }>("log", {}, props.version);
  const shown = PANELS.map((panel) => ({ panel, keys: keys.filter((key) => panel.keys.some((one) => (typeof one === "string" ? one === key : one.test(key)))) }));
  const missing = shown.filter((one) => one.keys.length === 0).map((one) => one.panel.title);
  const found = wanted ? keys.filter((key) => key.toLowerCase().includes(wanted.toLowerCase())) : [];
  const sft = useMemo(() => rows.filter((row) => "sft/loss" in row && "sft/step" in row).map((row) => ({ ...row, step: row["sft/step"] }) as Row), [rows]);
  const sftKeys = useMemo(() => keysOf(sft).filter((key) => key === "sft/loss" || key.startsWith("sft/exact_match/")), [sft]);

  return (
    <>
      <div class="about">
        <Tag kind="plain">{String(path(run.config, "algorithm", "name") ?? "run")}</Tag>
        <span>{String(path(run.config, "env", "id") ?? "")}</span>
        <span class="muted">{String(path(run.config, "model", "path") ?? "")}</span>
        <span class="muted">{run.folder}</span>
      </div>
      <Tiles run={run} rows={rows} steps={steps} />
      {rows.length === 0 && <Absent>{run.status.is === "running" ? "No finished step yet: curves appear after the first step." : "This run has written no metrics (metrics.jsonl)."}</Absent>}
      {props.unreadable > 0 && <Absent>{plural(props.unreadable, "row")} of metrics.jsonl could not be read.</Absent>}
      <div class="panels">
        <Evaluations rows={rows} theme={theme} />
        {shown.slice(0, 1).map((one) => one.keys.length > 0 && <Curves key={one.panel.title} rows={steps} keys={one.keys} panel={one.panel} theme={theme} wide={!rows.some((row) => "phase" in row)} />)}
      </div>
      {steps.length > 0 && <Timeline rows={rows} theme={theme} />}
      <div class="panels">
        {shown.slice(1).map((one) => one.keys.length > 0 && <Curves key={one.panel.title} rows={steps} keys={one.keys} panel={one.panel} theme={theme} />)}
        {sft.length > 0 && <Curves rows={sft} keys={sftKeys} panel={{ title: "Cold start, by its own steps", keys: [], from: 0 }} theme={theme} />}
      </div>
      {steps.length > 0 && (
        <Card title="Any other metric">
          <Search label="name" value={wanted} placeholder="engine/, queue/held_back_s, …" onChange={setWanted} note={wanted && <span class="muted">{plural(found.length, "metric")}</span>} />
          <div class="panels">
            {found.slice(0, 12).map((key) => (
              <Curves key={key} rows={steps} keys={[key]} panel={{ title: key, keys: [key] }} theme={theme} />
            ))}
          </div>
        </Card>
      )}
      {steps.length > 0 && missing.length > 0 && <Absent>This run has no figures of: {missing.join("; ")}.</Absent>}
      {run.steps.length === 0 && rows.length > 0 && <Absent>No archived trees: the run is older than RUN/trees, or archive.max_gb is 0. Its steps cannot be opened.</Absent>}
      <div class="panels">
        <Card title="End of the log" class="panel-wide">
          <pre key={log.value ? "text" : "none"} class="log" tabIndex={0} ref={toEnd}>{log.value?.text.trimEnd() ?? log.error ?? ""}</pre>
        </Card>
        <Card title="Configuration">
          {run.config === null ? <Absent>config.json is missing</Absent> : <Config value={run.config} />}
          {run.checkpoints.length > 0 && <p class="muted small">checkpoints: {run.checkpoints.join(", ")}</p>}
        </Card>
      </div>
      {run.steps.length > 0 && (
        <p>
          <a href={link(["trees", run.steps.at(-1) ?? 0])}>The trees of the last step</a>
        </p>
      )}
    </>
  );
}

function Config(props: { value: Row }) {
  return (
    <div class="config">
      {Object.entries(props.value).map(([key, value]) =>
        typeof value === "object" && value !== null && Object.keys(value).length > 0 ? (
          <details key={key}>
            <summary>{key}</summary>
            <Config value={value as Row} />
          </details>
        ) : (
          <div key={key} class="config-line">
            <span>{key}</span>
            <code>{JSON.stringify(value)}</code>
          </div>
        ),
      )}
    </div>
  );
}
