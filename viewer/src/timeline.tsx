// Time line of a run from its metrics: activity of the learner, publishing of weights and
// waits for it, load of engines and actors, evaluations.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import type { Row } from "./types";
import { Card, Select, color, num, seconds, useWidth } from "./ui";

interface Part {
  lane: number;
  from: number;
  to: number;
  color: string;
  height: number; // share of its lane
  text: string;
}

const LANES = ["learner", "weights", "engines", "actors"];
const PARTS: [string, string, string, number][] = [
  ["time/wait_s", "waits for trees", "--idle", 0],
  ["time/parity_s", "parity probe", "--series-4", 0],
  ["time/update_s", "updates", "--series-1", 0],
  ["time/publish_s", "publishes", "--series-2", 0],
  ["time/evaluate_and_save_s", "evaluates, saves", "--series-6", 0],
];
const HANDOVER = ["sleep", "wake", "publish", "load"]; // handover/..._s
const LANE = 30;
const LEFT = 64;
const BELOW = 22;

const of = (row: Row, key: string): number => (typeof row[key] === "number" ? (row[key] as number) : 0);

export function partsOf(steps: Row[]): { parts: Part[]; end: number } {
  const parts: Part[] = [];
  const rate = Math.max(1e-9, ...steps.map((row) => of(row, "time/sampled_tokens_per_s")));
  const most = Math.max(1e-9, ...steps.map((row) => of(row, "trees/in_flight") + of(row, "queue/ready")));
  let at = 0;
  for (const row of steps) {
    const step = `step ${num(row["step"])}`;
    const begin = at;
    for (const [key, what, fill] of PARTS) {
      const took = of(row, key);
      if (took <= 0) continue;
      parts.push({ lane: 0, from: at, to: at + took, color: fill, height: 1, text: `${step}: the learner ${what}, ${seconds(took)}` });
      if (key === "time/publish_s") {
        const version = num(row["policy_version"]);
        const handover = HANDOVER.map((part) => `${part} ${seconds(of(row, `handover/${part}_s`))}`).join(", ");
        const whole = of(row, "handover/total_s");
        parts.push({ lane: 1, from: at, to: at + took, color: "--series-2", height: 1, text: `version ${version} is published in ${seconds(took)}: the learner waits; engines load it between tokens and keep their requests${whole > 0 ? `. Hand-over ${seconds(whole)}: ${handover}` : ""}` });
      }
      at += took;
    }
    if (at === begin) continue;
    const tokens = of(row, "time/sampled_tokens_per_s");
    if (tokens > 0) parts.push({ lane: 2, from: begin, to: at, color: "--series-3", height: tokens / rate, text: `${step}: engines sampled ${num(tokens)} tokens per second` });
    const growing = of(row, "trees/in_flight");
    const ready = of(row, "queue/ready");
    if (growing + ready > 0) {
      parts.push({ lane: 3, from: begin, to: at, color: "--idle", height: (growing + ready) / most, text: `${step}: ${num(growing)} trees grow, ${num(ready)} wait in the queue` });
      parts.push({ lane: 3, from: begin, to: at, color: "--series-4", height: growing / most, text: `${step}: ${num(growing)} trees grow, ${num(ready)} wait in the queue` });
    }
  }
  return { parts, end: at };
}

export function Timeline(props: { rows: Row[]; theme: string }) {
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const [count, setCount] = useState("all");
  const [hint, setHint] = useState("");
  const steps = useMemo(() => props.rows.filter((row) => "trees/offered" in row), [props.rows]);
  const { parts, end } = useMemo(() => partsOf(count === "all" ? steps : steps.slice(-Number(count))), [steps, count]);
  const height = LANES.length * LANE + BELOW;
  const scale = (width - LEFT - 4) / Math.max(end, 1e-9);

  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    if (!element || !context || width === 0) return;
    element.width = width * devicePixelRatio;
    element.height = height * devicePixelRatio;
    context.scale(devicePixelRatio, devicePixelRatio);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const colors = new Map<string, string>();
    LANES.forEach((lane, place) => {
      context.fillStyle = color("--muted");
      context.fillText(lane, 0, place * LANE + LANE / 2);
      context.fillStyle = color("--line");
      context.fillRect(LEFT, (place + 1) * LANE - 1, width - LEFT, 1);
    });
    for (const part of parts) {
      const x = LEFT + part.from * scale;
      const w = Math.max(part.lane === 1 ? 1.5 : 0.6, (part.to - part.from) * scale - (scale * (part.to - part.from) > 4 ? 0.5 : 0));
      const h = Math.max(1, (LANE - 8) * part.height);
      if (!colors.has(part.color)) colors.set(part.color, color(part.color));
      context.fillStyle = colors.get(part.color) ?? "";
      context.fillRect(x, part.lane * LANE + LANE - 3 - h, w, h);
    }
    context.fillStyle = color("--muted");
    context.textAlign = "center";
    const step = niceStep(end / Math.max(2, width / 110));
    for (let t = 0; t <= end; t += step) {
      const half = context.measureText(clock(t)).width / 2 + 1;
      context.fillText(clock(t), Math.min(width - half, Math.max(LEFT + half, LEFT + t * scale)), height - BELOW / 2);
    }
  }, [parts, width, height, props.theme]);

  const pointed = (event: PointerEvent) => {
    const area = (event.currentTarget as HTMLElement).getBoundingClientRect();
    const t = (event.clientX - area.left - LEFT) / scale;
    const lane = Math.floor((event.clientY - area.top) / LANE);
    const part = parts.find((one) => one.lane === lane && one.from <= t && t < Math.max(one.to, one.from + 2 / scale));
    setHint(part?.text ?? "");
  };

  const lacks = ["time/update_s", "trees/in_flight", "time/sampled_tokens_per_s"].filter((key) => !steps.some((row) => key in row));
  return (
    <Card
      title="Time line"
      aside={
        <Select
          label="steps"
          value={count}
          onChange={setCount}
          options={[
            ["all", "all"],
            ["50", "last 50"],
            ["10", "last 10"],
          ]}
        />
      }
    >
      <div class="timeline" ref={box}>
        <canvas ref={canvas} style={{ width: "100%", height: `${height}px` }} onPointerMove={pointed} onPointerLeave={() => setHint("")} role="img" aria-label={`Time line of ${steps.length} steps, ${seconds(end)}`} />
      </div>
      <p class="small legend-line">
        {PARTS.map(([key, what, fill]) => (
          <span key={key} class="legend">
            <i style={{ background: `var(${fill})` }} /> {what}
          </span>
        ))}
      </p>
      <p class="small hint">{hint || <span class="muted">{end > 0 ? "The parts of each step in order; evaluations and the cold start before the first step are omitted. Hover over a part for details." : `This run has no ${lacks.join(", ")}.`}</span>}</p>
    </Card>
  );
}

function clock(t: number): string {
  if (t < 60) return `${t} s`;
  const [hours, minutes, rest] = [Math.floor(t / 3600), Math.floor((t % 3600) / 60), Math.floor(t % 60)];
  const two = (value: number) => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)} h` : `${minutes}:${two(rest)} min`;
}

function niceStep(least: number): number {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  return steps.find((step) => step >= least) ?? Math.ceil(least / 86400) * 86400;
}
