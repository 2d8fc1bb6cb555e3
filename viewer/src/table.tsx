// A table of any length: only the rows in sight are in the page.

import { Component, type ComponentChildren } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";

import { go } from "./route";
import { cx, plural } from "./ui";

const ROW = 30; // pixels
const FAR_MS = 100; // between two pictures while more than what is in sight goes by
const MORE = 6; // rows above and below those in sight

export interface Column<T> {
  key: string;
  title: string;
  width: string;
  about?: string;
  align?: "right";
  cell: (row: T) => ComponentChildren;
  sort?: (row: T) => number | string | null;
  narrow?: boolean; // shown on a small screen too
}

interface Props<T> {
  label: string;
  columns: Column<T>[];
  rows: T[];
  href: (row: T) => string;
  rowKey: (row: T) => string;
  current?: string;
  height?: string;
}

function compare(a: number | string | null, b: number | string | null): number {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}

interface RowProps<T> {
  columns: Column<T>[];
  row: T;
  place: number;
  name: string;
  href: (row: T) => string;
  template: string;
  mark: string | false;
}

/** A row, memoized: scrolling moves most rows and changes few. */
class Row<T> extends Component<RowProps<T>> {
  override shouldComponentUpdate(next: RowProps<T>) {
    const { columns, row, place, name, template, mark } = this.props;
    return next.row !== row || next.place !== place || next.mark !== mark || next.columns !== columns || next.template !== template || next.name !== name;
  }

  override render() {
    const { columns, row, place, name, href, template, mark } = this.props;
    return (
      <div id={`row-${place}`} role="row" aria-rowindex={place + 2} class={cx("grid-row", mark)} style={{ gridTemplateColumns: template, transform: `translateY(${place * ROW}px)` }}>
        {columns.map((column, number) => (
          <span key={column.key} role="gridcell" class={cx("grid-cell", column.align)}>
            {number === 0 && <a class="grid-open" tabIndex={-1} href={href(row)} aria-label={`open ${name}`} />}
            {column.cell(row)}
          </span>
        ))}
      </div>
    );
  }
}

export function Table<T>(props: Props<T>) {
  const { columns, rows } = props;
  const [sort, setSort] = useState<{ key: string; falls: boolean } | null>(null);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(600);
  const [active, setActiveShown] = useState(-1);
  const at = useRef(-1); // the same at once: a key may come before the one before it is drawn
  const setActive = (place: number) => {
    at.current = place;
    setActiveShown(place);
  };
  const body = useRef<HTMLDivElement>(null);

  const sorted = useMemo(() => {
    const by = columns.find((column) => column.key === sort?.key)?.sort;
    if (by === undefined || sort === null) return rows;
    const keyed = rows.map((row) => [by(row), row] as const);
    keyed.sort((a, b) => compare(a[0], b[0]) * (sort.falls && a[0] !== null && b[0] !== null ? -1 : 1));
    return keyed.map((pair) => pair[1]);
  }, [rows, sort, columns]);

  useLayoutEffect(() => {
    const element = body.current;
    if (element === null) return;
    const observer = new ResizeObserver(() => setHeight(element.clientHeight));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  const marked = useRef<string | null>(null);
  useLayoutEffect(() => {
    // rows that arrive later, such as details of trees, keep the scroll position
    if (marked.current !== null) setActive(sorted.findIndex((row) => props.rowKey(row) === marked.current));
  }, [sorted]);

  const late = useRef({ timer: 0, at: 0 });
  const show = () => {
    const { current } = late;
    clearTimeout(current.timer);
    current.timer = 0;
    current.at = performance.now();
    if (body.current !== null) setTop(Math.floor(body.current.scrollTop / ROW) * ROW);
  };
  const scrolled = () => {
    const { current } = late;
    const isFar = Math.abs((body.current?.scrollTop ?? 0) - top) > height;
    // rows are unreadable while the scroll bar is dragged: a few frames per second suffice
    const wait = isFar ? current.at + FAR_MS - performance.now() : 0;
    if (wait <= 0) show();
    else if (current.timer === 0) current.timer = window.setTimeout(show, wait);
  };
  useEffect(() => () => clearTimeout(late.current.timer), []);

  const first = Math.max(0, Math.floor(top / ROW) - MORE);
  const last = Math.min(sorted.length, Math.ceil((top + height) / ROW) + MORE);
  const template = columns.map((column) => column.width).join(" ");

  const move = (to: number) => {
    const place = Math.min(sorted.length - 1, Math.max(0, to));
    const row = sorted[place];
    marked.current = row === undefined ? null : props.rowKey(row);
    setActive(row === undefined ? -1 : place);
    const element = body.current;
    if (element === null) return;
    if (place * ROW < element.scrollTop) element.scrollTop = place * ROW;
    else if ((place + 1) * ROW > element.scrollTop + element.clientHeight - ROW) element.scrollTop = (place + 2) * ROW - element.clientHeight;
  };
  const page = Math.max(1, Math.floor(height / ROW) - 2);
  const pressed = (event: KeyboardEvent) => {
    const row = sorted[at.current];
    const steps: Record<string, number> = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -sorted.length, End: sorted.length };
    const step = steps[event.key];
    if (step !== undefined) move(at.current + step);
    else if (event.key === "Enter" && row !== undefined) go(props.href(row));
    else return;
    event.preventDefault();
    event.stopPropagation();
  };

  const order = (column: Column<T>) => {
    if (column.sort === undefined) return;
    setSort(sort?.key !== column.key ? { key: column.key, falls: column.align === "right" } : { key: column.key, falls: !sort.falls });
  };

  // An element is used again by the row that comes into sight as its own leaves it, and stays where
  // it is among the others: aria-rowindex tells the order.
  const slots = Math.ceil(height / ROW) + 2 * MORE + 2;
  const drawn: ComponentChildren[] = Array.from({ length: slots });
  for (let place = first; place < last; place++) {
    const row = sorted[place] as T;
    const name = props.rowKey(row);
    drawn[place % slots] = <Row key={place % slots} columns={columns} row={row} place={place} name={name} href={props.href} template={template} mark={place === active ? "active" : name === props.current && "current"} />;
  }

  return (
    <div class="grid" role="grid" aria-label={props.label} aria-rowcount={sorted.length + 1}>
      <div class="grid-body" ref={body} tabIndex={0} style={{ height: `min(${props.height ?? "64vh"}, ${(sorted.length || 1) * ROW + 48}px)` }} onScroll={scrolled} onKeyDown={pressed} aria-activedescendant={active >= 0 ? `row-${active}` : undefined}>
        <div class="grid-head" role="row" style={{ gridTemplateColumns: template }}>
          {columns.map((column) => (
            <span key={column.key} role="columnheader" aria-sort={sort?.key === column.key ? (sort.falls ? "descending" : "ascending") : undefined} class={cx("grid-title", column.align)}>
              <button type="button" tabIndex={-1} title={column.about} disabled={column.sort === undefined} onClick={() => order(column)}>
                {column.title}
                {sort?.key === column.key && <span aria-hidden="true">{sort.falls ? " ↓" : " ↑"}</span>}
              </button>
            </span>
          ))}
        </div>
        <div class="grid-rows" style={{ height: `${sorted.length * ROW}px` }}>
          {drawn}
        </div>
        {sorted.length === 0 && <p class="absent">no matching rows</p>}
      </div>
      <div class="grid-foot muted">{plural(sorted.length, "row")}</div>
    </div>
  );
}
