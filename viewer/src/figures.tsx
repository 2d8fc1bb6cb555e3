// Figures of an evaluation by group: scores, cost, pass@k; and their distributions.

import type { ComponentChildren } from "preact";
import { useMemo } from "preact/hooks";

import type { Estimate, EvaluationIndex, FiguresOf, Summary } from "./types";
import { Card, Interval, cx, num } from "./ui";

export function Value(props: { of: Estimate | undefined }) {
  const { of } = props;
  if (of === undefined || of.value === null) return <span class="muted">–</span>;
  return (
    <>
      {num(of.value)} {of.low !== null && <span class="muted small">[{num(of.low)}, {num(of.high)}]</span>}
    </>
  );
}

type Group = [string, string, FiguresOf];

function groupsOf(summary: Summary): Group[] {
  const fields = Object.entries(summary.groups).filter(([field, values]) => field !== "dataset" || Object.keys(values).length > 1);
  return [["", "all", summary.overall], ...fields.flatMap(([field, values]) => Object.entries(values).map(([value, of]) => [field, value, of] as Group))];
}

function Grouped(props: { groups: Group[]; titles: [string, string?][]; cells: (of: FiguresOf) => ComponentChildren[]; left?: number[] }) {
  const align = (place: number) => (props.left?.includes(place) ? undefined : "right");
  return (
    <div class="scroll">
      <table class="plain list">
        <thead>
          <tr>
            <th>questions</th>
            {props.titles.map(([title, about], place) => (
              <th key={title} class={align(place)} title={about}>
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.groups.map(([field, value, of]) => (
            <tr key={`${field} ${value}`}>
              <td>
                <span class="muted">{field}</span> {value}
              </td>
              {props.cells(of).map((cell, place) => (
                <td key={place} class={align(place)}>
                  {cell}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

const SCORES: [string, string, string][] = [
  ["reward", "reward", "of the environment's grader"],
  ["em", "EM", "equal to a gold answer after normalizing"],
  ["f1", "F1", "of its tokens"],
  ["contains", "contains", "contains the words of a gold answer in sequence"],
  ["rule", "rules", "verdict of the layered grader"],
  ["math", "math", "the same, mathematics only"],
  ["judge", "judge", "accepted by the judge, of the answers that it was asked about"],
];

export function Scores(props: { summary: Summary }) {
  const { summary } = props;
  const { overall } = summary;
  const shown = SCORES.filter(([name]) => name in overall.estimates);
  const failed = Object.entries(overall.failures).map(([kind, count]) => `${kind} ${count}`);
  return (
    <Card title="Scores by group">
      <Grouped
        groups={groupsOf(summary)}
        titles={[["number"], ["graded", "trajectories"], ["success", "of the environment's grader, with its 95 % interval"], [""], ...shown.map(([, title, about]) => [title, about] as [string, string]), ["valid", "trajectories with an answer"], ["failed", "excluded from all other figures"]]}
        left={[2, 3]}
        cells={(of) => [num(of.num_questions), num(of.num_trajectories), <Value of={of.estimates["success"]} />, of.estimates["success"] && <Interval {...of.estimates["success"]} />, ...shown.map(([name]) => num(of.estimates[name]?.value)), num(of.num_valid), <span class={cx(of.num_failed > 0 && "bad")}>{num(of.num_failed)}</span>]}
      />
      <p class="small muted">
        95 % intervals are over questions.
        {Object.keys(summary.groups["dataset"] ?? {}).length > 1 && summary.average !== null && ` The mean of the sets is ${num(summary.average)}.`}
        {overall.num_failed > 0 && ` Failed trajectories (${failed.join(", ")}) are excluded from scores; counted as wrong, success would be ${num(overall.success_if_failed_wrong)}.`}
        {summary.compat && " EM, F1, contains and math are those of the published code."}
      </p>
    </Card>
  );
}

export function WithinK(props: { summary: Summary; ks: number[] }) {
  const { summary, ks } = props;
  const groups = groupsOf(summary);
  const few = ks.filter((k) => (summary.overall.pass_at[k]?.num_questions ?? 0) < summary.overall.num_questions);
  const votes = groups.some(([, , of]) => Object.keys(of.majority_at).length > 0);
  const table = (name: "pass_at" | "majority_at") => <Grouped groups={groups} titles={ks.map((k) => [`k = ${k}`])} left={ks.map((_, i) => i)} cells={(of) => ks.map((k) => <Value of={of[name][k]} />)} />;
  return (
    <Card title="Correct within k samples, pass@k">
      {table("pass_at")}
      {votes && (
        <>
          <h3>Majority vote among k samples, maj@k</h3>
          {table("majority_at")}
        </>
      )}
      {few.length > 0 && <p class="small muted">Questions with k samples that ended: {few.map((k) => `k = ${k}: ${num(summary.overall.pass_at[k]?.num_questions)}`).join(", ")}.</p>}
    </Card>
  );
}

export function Cost(props: { summary: Summary }) {
  const pair = (of: FiguresOf, name: string) => `${num(of.spreads[name]?.median, 2)} / ${num(of.spreads[name]?.p95, 2)}`;
  return (
    <Card title="Cost of a trajectory">
      <Grouped
        groups={groupsOf(props.summary)}
        titles={[
          ["tool calls"],
          ["right / call", "all correct answers over all tool calls"],
          ["used a tool", "share of the trajectories"],
          ["correct with tools", "share of correct ones among the trajectories that used a tool"],
          ["ARPO productivity", "success * calls / (calls + 0.1) * 100"],
          ["turns"],
          ["tokens", "sampled ones"],
          ["median / 95 %"],
          ["tool tokens"],
          ["seconds, median / 95 %"],
        ]}
        cells={(of) => [
          num(of.spreads["tool_calls"]?.mean, 2),
          num(of.estimates["tool_productivity"]?.value),
          num(of.estimates["tool_use"]?.value),
          num(of.estimates["tool_efficiency"]?.value),
          num(of.arpo_tool_productivity, 1),
          num(of.spreads["turns"]?.mean, 2),
          num(of.spreads["action_tokens"]?.mean, 1),
          pair(of, "action_tokens"),
          num(of.spreads["tool_tokens"]?.mean, 1),
          pair(of, "seconds"),
        ]}
      />
    </Card>
  );
}

const BARS = 40;
const [WIDE, HIGH] = [400, 120];

/** Bars of equal width, correct ones below wrong ones; over integers each bar spans the same number of values. */
function Histogram(props: { title: string; values: [number, boolean][]; whole?: boolean; unit?: string }) {
  const { values, whole, unit = "" } = props;
  const found = useMemo(() => {
    const sorted = values.map(([value]) => value).sort((a, b) => a - b);
    const at = (share: number) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 0;
    let low = sorted[0] ?? 0;
    const high = sorted.at(-1) ?? 0;
    if (low >= 0 && low < high / 2) low = 0;
    const width = whole ? Math.ceil((high - low + 1) / BARS) : (high - low) / BARS || 1;
    const bars = Array.from({ length: whole ? Math.floor((high - low) / width) + 1 : BARS }, () => [0, 0] as [number, number]);
    for (const [value, right] of values) {
      const bar = bars[Math.min(bars.length - 1, Math.floor((value - low) / width))];
      if (bar) bar[right ? 0 : 1]++;
    }
    return { low, high, width, bars, most: Math.max(...bars.map(([a, b]) => a + b)), median: at(0.5), p95: at(0.95) };
  }, [values, whole]);
  const { low, high, width, bars, most } = found;
  const step = WIDE / bars.length;
  const up = (count: number) => (HIGH * count) / most;
  const across = (value: number) => Math.min(WIDE, ((value - low) / width + (whole ? 0.5 : 0)) * step);
  const said = (place: number, [right, wrong]: [number, number]) => `${num(low + place * width, 2)}${whole && width === 1 ? "" : ` to ${num(low + (place + 1) * width - (whole ? 1 : 0), 2)}`}${unit}: ${right} correct, ${wrong} wrong`;
  return (
    <figure class="histogram">
      <figcaption>
        {props.title} <span class="muted">median {num(found.median, 2)}, 95 % within {num(found.p95, 2)}{unit}</span>
      </figcaption>
      <svg viewBox={`0 0 ${WIDE} ${HIGH}`} preserveAspectRatio="none" role="img" aria-label={`${props.title}: from ${num(low, 2)} to ${num(high, 2)}, median ${num(found.median, 2)}`}>
        {bars.map((bar, place) => (
          <g key={place}>
            <title>{said(place, bar)}</title>
            <rect class="bar-right" x={place * step + 0.5} width={Math.max(0.5, step - 1)} y={HIGH - up(bar[0])} height={up(bar[0])} />
            <rect class="bar-wrong" x={place * step + 0.5} width={Math.max(0.5, step - 1)} y={HIGH - up(bar[0] + bar[1])} height={up(bar[1])} />
          </g>
        ))}
        <line class="bar-line" x1={across(found.median)} x2={across(found.median)} y1="0" y2={HIGH} />
        <line class="bar-line bar-dotted" x1={across(found.p95)} x2={across(found.p95)} y1="0" y2={HIGH} />
      </svg>
      <div class="histogram-foot small muted">
        <span>{num(low, 2)}</span>
        <span>up to {num(most)} a bar</span>
        <span>
          {num(high, 2)}
          {unit}
        </span>
      </div>
    </figure>
  );
}

export function Spreads(props: { index: EvaluationIndex }) {
  const { rows } = props.index;
  const [calls, tokens, took] = useMemo(() => {
    const done = rows.filter((row) => row[8] !== "failed");
    return [11, 13, 14].map((column) => done.map((row) => [Number(row[column]), row[6] === true] as [number, boolean]));
  }, [rows]);
  if (!calls?.length) return null;
  return (
    <Card
      title="Distributions"
      aside={
        <span class="legend-line small">
          <span class="legend">
            <i class="legend-good" /> right
          </span>
          <span class="legend">
            <i class="legend-muted" /> wrong
          </span>
        </span>
      }
    >
      <div class="histograms">
        <Histogram title="tool calls" values={calls} whole />
        <Histogram title="sampled tokens" values={tokens ?? []} whole />
        <Histogram title="time" values={took ?? []} unit=" s" />
      </div>
    </Card>
  );
}
