// Small parts that all pages share.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { ask, type Query } from "./source";

export function cx(...names: (string | false | null | undefined)[]): string {
  return names.filter(Boolean).join(" ");
}

/** A number with three significant digits. */
export function num(value: unknown, digits = 3): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value === 0) return "0"; // also what was -0
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : digits);
}

export function seconds(value: unknown): string {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value: number): string {
  return value < 1e6 ? `${Math.ceil(value / 1e3)} kB` : value < 1e9 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(2)} GB`;
}

export function percent(value: number | null | undefined): string {
  return typeof value === "number" ? `${(100 * value).toFixed(1)} %` : "–";
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

export function Tile(props: { name: string; children: ComponentChildren; note?: ComponentChildren; title?: string }) {
  return (
    <div class="tile" title={props.title}>
      <div class="tile-name">{props.name}</div>
      <div class="tile-value">{props.children}</div>
      {props.note && <div class="tile-note">{props.note}</div>}
    </div>
  );
}

export function Tag(props: { kind?: string; children: ComponentChildren; title?: string }) {
  return (
    <span class={cx("tag", props.kind && `tag-${props.kind}`)} title={props.title}>
      {props.children}
    </span>
  );
}

export function Card(props: { title?: ComponentChildren; aside?: ComponentChildren; class?: string; children: ComponentChildren }) {
  return (
    <section class={cx("card", props.class)}>
      {(props.title || props.aside) && (
        <header class="card-head">
          <h2>{props.title}</h2>
          {props.aside && <div class="card-aside">{props.aside}</div>}
        </header>
      )}
      {props.children}
    </section>
  );
}

export function Absent(props: { children: ComponentChildren }) {
  return <p class="absent">{props.children}</p>;
}

export type Answer<T> = { value?: T; error?: string };

/** An answer, refetched when `version` changes; the old one stays meanwhile. */
export function useAnswer<T>(path: string | null, query: Query = {}, version: unknown = 0): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T> & { of?: string }>({});
  const key = path && `${path}?${new URLSearchParams(query)}`;
  useEffect(() => {
    if (path === null) return;
    let current = true;
    ask<T>(path, query).then(
      (value) => current && setAnswer({ value, of: key ?? "" }),
      (error: unknown) => current && setAnswer({ error: String((error as Error).message ?? error), of: key ?? "" }),
    );
    return () => {
      current = false;
    };
  }, [key, version]);
  return answer.of === key ? answer : {};
}

export function Waiting<T>(props: { answer: Answer<T>; children: (value: T) => ComponentChildren }) {
  const { value, error } = props.answer;
  if (error !== undefined) return <Absent>{error}</Absent>;
  if (value === undefined) return <p class="waiting" aria-busy="true">reading …</p>;
  return <>{props.children(value)}</>;
}

/** The width of an element, as it changes. */
export function useWidth<T extends HTMLElement>(): [{ current: T | null }, number] {
  const element = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    if (element.current === null) return;
    setWidth(Math.floor(element.current.clientWidth)); // the observer waits for a frame, which a print does not
    const observer = new ResizeObserver((entries) => {
      for (const entry of entries) setWidth(Math.floor(entry.contentRect.width));
    });
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return [element, width];
}

/** Keys that work everywhere except in text fields. */
export function useKeys(keys: Record<string, () => void>): void {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const pressed = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      const isField = /^(INPUT|SELECT|TEXTAREA)$/.test(target.tagName);
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
      if (isField) {
        if (event.key === "Escape") target.blur();
        return;
      }
      const action = latest.current[event.key];
      if (action !== undefined) {
        event.preventDefault();
        action();
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

export function Select(props: { label: string; value: string; options: [string, string][]; onChange: (value: string) => void }) {
  return (
    <label class="field">
      <span>{props.label}</span>
      <select value={props.value} onChange={(event) => props.onChange(event.currentTarget.value)}>
        {props.options.map(([value, text]) => (
          <option key={value} value={value}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

/** A debounced text field. */
export function Search(props: { label: string; value: string; placeholder?: string; onChange: (value: string) => void; note?: ComponentChildren }) {
  const [text, setText] = useState(props.value);
  useEffect(() => setText(props.value), [props.value]);
  useEffect(() => {
    if (text === props.value) return;
    const timer = setTimeout(() => props.onChange(text), 250);
    return () => clearTimeout(timer);
  }, [text]);
  return (
    <label class="field field-wide">
      <span>
        {props.label} {props.note}
      </span>
      <input type="search" value={text} placeholder={props.placeholder} onInput={(event) => setText(event.currentTarget.value)} />
    </label>
  );
}

/** A mean with its interval, drawn on [0, 1]. */
export function Interval(props: { value: number | null; low: number | null; high: number | null; from?: number; to?: number }) {
  const { value, low, high, from = 0, to = 1 } = props;
  if (value === null) return <span class="muted">–</span>;
  const at = (x: number) => 100 * Math.min(1, Math.max(0, (x - from) / (to - from)));
  return (
    <svg class="interval" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">
      <line class="interval-axis" x1="0" x2="100" y1="6" y2="6" />
      {low !== null && high !== null && <rect class="interval-range" x={at(low)} width={Math.max(0.6, at(high) - at(low))} y="3.5" height="5" />}
      <rect class="interval-value" x={Math.min(98.8, Math.max(0, at(value) - 0.6))} width="1.2" y="1" height="10" />
    </svg>
  );
}

/** Colors of series, as the style sheet has them now. */
export function color(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function seriesColor(place: number): string {
  return color(`--series-${(place % 8) + 1}`);
}
