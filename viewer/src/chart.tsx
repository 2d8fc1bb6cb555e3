// Curves, by uPlot: value by step, intervals as whiskers, one cursor in all of them.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";

import { color, num, seriesColor, useWidth } from "./ui";

export interface Series {
  label: string;
  values: (number | null)[];
  low?: (number | null)[];
  high?: (number | null)[];
  dash?: boolean;
  points?: boolean;
}

interface Props {
  x: number[];
  series: Series[];
  height?: number;
  from?: number;
  to?: number;
  theme: string;
  xLabel?: string;
  log2?: boolean;
  labels?: string[]; // of the places 0, 1, ... in place of numbers
}

const HEIGHT = 190;

function whiskers(series: Series[]): (plot: uPlot) => void {
  return (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    series.forEach((one, place) => {
      if (one.low === undefined || one.high === undefined || plot.series[place + 1]?.show === false) return;
      ctx.strokeStyle = seriesColor(place);
      (plot.data[0] as number[]).forEach((x, i) => {
        const low = one.low?.[i];
        const high = one.high?.[i];
        if (typeof low !== "number" || typeof high !== "number") return;
        const at = plot.valToPos(x, "x", true);
        const cap = 3 * devicePixelRatio;
        ctx.beginPath();
        for (const end of [low, high]) {
          const y = plot.valToPos(end, "y", true);
          ctx.moveTo(at - cap, y);
          ctx.lineTo(at + cap, y);
        }
        ctx.moveTo(at, plot.valToPos(low, "y", true));
        ctx.lineTo(at, plot.valToPos(high, "y", true));
        ctx.stroke();
      });
    });
    ctx.restore();
  };
}

export function Chart(props: Props) {
  const [box, width] = useWidth<HTMLDivElement>();
  const plot = useRef<uPlot | null>(null);
  const names = props.series.map((one) => one.label).join("\n");

  useEffect(() => {
    if (box.current === null || width === 0) return;
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
    const made = new uPlot(
      {
        width,
        height: props.height ?? HEIGHT,
        padding: [8, 8, 0, 0],
        cursor: { sync: { key: props.xLabel ?? "step" }, drag: { x: true, y: false }, points: { size: 6 } },
        legend: { live: true },
        scales: { x: { time: false, ...(props.log2 ? { distr: 3, log: 2 } : {}), ...(props.labels ? { range: [-0.5, props.labels.length - 0.5] } : {}) }, y: { range: (_, low, high) => range(low, high, props.from, props.to) } },
        axes: [
          { ...axis, size: 26, gap: 3, ...(props.labels ? { splits: () => props.x, values: (_: uPlot, at: number[]) => at.map((one) => named(props.labels ?? [], one, width)) } : props.log2 ? { splits: () => props.x, values: (_: uPlot, at: number[]) => at.map(String) } : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }) },
          { ...axis, size: (_, values) => Math.max(46, 14 + 6.6 * Math.max(0, ...(values ?? []).map((one) => one.length))), gap: 3, values: (_, at) => at.map(tick) },
        ],
        series: [
          { label: props.xLabel ?? "step", value: (_, v) => (v === null ? "" : (props.labels?.[v] ?? num(v))) },
          ...props.series.map((one, place) => ({
            label: one.label,
            stroke: seriesColor(place),
            width: 1.6,
            dash: one.dash ? [5, 4] : undefined,
            spanGaps: true,
            points: { show: one.points ?? props.x.length < 40, size: 4, fill: seriesColor(place) },
            value: (_: uPlot, v: number | null) => (v === null ? "" : num(v)),
          })),
        ],
        hooks: { draw: [whiskers(props.series)], setLegend: [(self) => self.legend.idx === null && showLast(self)] },
      },
      [props.x, ...props.series.map((one) => one.values)] as uPlot.AlignedData,
      box.current,
    );
    plot.current = made;
    showLast(made);
    return () => {
      made.destroy();
      plot.current = null;
    };
  }, [width, names, props.theme, props.height, props.labels?.join()]);

  useEffect(() => {
    plot.current?.setData([props.x, ...props.series.map((one) => one.values)] as uPlot.AlignedData);
    if (plot.current) showLast(plot.current);
  }, [props.x, props.series]);

  return <div class="chart" ref={box} />;
}

/** As many labels as fit. */
function named(labels: string[], place: number, width: number): string {
  const every = Math.ceil((labels.length * 76) / Math.max(1, width - 60));
  return Number.isInteger(place) && place % every === 0 ? (labels[place] ?? "") : "";
}

function tick(value: number): string {
  if (value === 0 || Math.abs(value) >= 0.01) return num(value, 2);
  return Math.abs(value) < 0.001 ? value.toExponential(0) : String(Number(value.toPrecision(2)));
}

/** Without a cursor the legend shows the last values. */
function showLast(plot: uPlot): void {
  if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
}

function range(low: number | null, high: number | null, from?: number, to?: number): [number, number] {
  let a = from ?? low ?? 0;
  let b = to ?? high ?? 1;
  if (from === undefined && a > 0 && a < 0.35 * b) a = 0;
  if (a === b) [a, b] = [a - Math.max(0.5, Math.abs(a) * 0.1), b + Math.max(0.5, Math.abs(b) * 0.1)];
  const gap = 0.06 * (b - a);
  return [from ?? (a === 0 ? 0 : a - gap), to ?? b + gap];
}
