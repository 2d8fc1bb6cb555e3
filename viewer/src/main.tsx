// The page: the shown run, the place in it, and whether it still changes.

import { render } from "preact";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

import "uplot/dist/uPlot.min.css";
import "./style.css";

import { EvaluationPage, EvaluationsPage } from "./evaluation";
import { go, link, useRoute } from "./route";
import { RunPage } from "./run";
import { ask, forget, isLive } from "./source";
import { TreePage } from "./tree";
import { TreesPage } from "./trees";
import type { Index, Metrics, Row, Run, State } from "./types";
import { Absent, cx, plural, useAnswer, useKeys } from "./ui";

const LOOK_MS = 2000;
const THEMES = ["auto", "light", "dark"];

function stored(): string {
  try {
    return localStorage.getItem("theme") ?? "auto";
  } catch {
    return "auto"; // a file may have no storage
  }
}

function useTheme(): [string, string, () => void] {
  const [wanted, setWanted] = useState(stored);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [system, setSystem] = useState(dark.matches);
  useEffect(() => {
    const changed = () => setSystem(dark.matches);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  const theme = wanted === "auto" ? (system ? "dark" : "light") : wanted;
  document.documentElement.dataset["theme"] = theme;
  const next = useCallback(() => {
    setWanted((old) => {
      const found = THEMES[(THEMES.indexOf(old) + 1) % THEMES.length] ?? "auto";
      try {
        localStorage.setItem("theme", found);
      } catch {
        // then it is forgotten
      }
      return found;
    });
  }, []);
  return [theme, wanted, next];
}

interface Followed {
  run: Run | null;
  rows: Row[];
  unreadable: number;
  state: State | null;
  error: string;
  lost: boolean;
}

/** The run and its metrics, updated as they are written. */
function useRun(): Followed {
  const [found, setFound] = useState<Followed>({ run: null, rows: [], unreadable: 0, state: null, error: "", lost: false });
  const epoch = useRef<string>("");
  useEffect(() => {
    let ends = false;
    let last = "";
    let count = 0;
    const look = async () => {
      const state = isLive ? await ask<State>("state", {}, true) : null;
      const now = JSON.stringify(state);
      if (now !== last || state === null) {
        const before = last ? (JSON.parse(last) as State) : null;
        if (before !== null && JSON.stringify(state?.trees) !== JSON.stringify(before.trees)) {
          forget("steps?");
          if (state !== null) forget(`steps/${state.trees[1]}`);
        }
        for (const id in state?.evaluations) if (before !== null && state.evaluations[id] !== before.evaluations[id]) forget(`evaluations/${id}`);
        forget("log");
        forget("compare");
        const run = await ask<Run>("run", {}, true);
        const metrics = await ask<Metrics>("metrics", isLive ? { from: String(count), epoch: epoch.current } : {}, true);
        const isOther = String(metrics.epoch) !== epoch.current;
        epoch.current = String(metrics.epoch);
        last = now;
        setFound((old) => {
          const rows = isOther || metrics.from === 0 ? metrics.rows : metrics.rows.length ? [...old.rows.slice(0, metrics.from), ...metrics.rows] : old.rows;
          count = rows.length;
          return { run, rows, unreadable: metrics.num_unreadable, state, error: "", lost: false };
        });
      } else setFound((old) => (old.lost ? { ...old, lost: false } : old));
    };
    const loop = async () => {
      while (!ends) {
        if (!document.hidden || last === "")
          await look().catch((error: Error) => setFound((old) => ({ ...old, lost: true, error: error.message })));
        if (!isLive) return;
        await new Promise((done) => setTimeout(done, LOOK_MS));
      }
    };
    void loop();
    return () => {
      ends = true;
    };
  }, []);
  return found;
}

const HELP: [string, string][] = [
  ["1 2 3", "run, trees, evaluations"],
  ["↑ ↓ or j k, Enter", "in a table: move, open"],
  ["j k", "in a tree: next and previous branch; in a transcript: next row"],
  ["] [", "next tree, previous tree"],
  ["← →", "token by token"],
  ["c", "color tokens by the next metric"],
  ["b", "two branches side by side"],
  ["t", "light, dark, or as the system"],
  ["Esc", "one level up"],
  ["?", "this help"],
];

function App() {
  const route = useRoute();
  const [theme, wanted, nextTheme] = useTheme();
  const { run, rows, unreadable, state, error, lost } = useRun();
  const [isHelp, setHelp] = useState(false);
  const trees = JSON.stringify(state?.trees ?? 0);
  const only = run?.is_run === false && run.evaluations.length === 1 ? run.evaluations[0]?.id : undefined;
  const [page = run?.is_run === false ? "evaluations" : "run", ...asked] = route.parts;
  const parts = page === "evaluations" && asked.length === 0 && only !== undefined ? [only] : asked;
  const index = useAnswer<Index>(page === "trees" && run !== null && parts.length < 2 && run.steps.length > 0 ? "steps" : null, {}, trees);
  const lastIndex = useRef(index);
  if (index.value !== undefined || index.error !== undefined) lastIndex.current = index;
  useKeys({
    "1": () => go(link(["run"])),
    "2": () => go(link(["trees"])),
    "3": () => go(link(["evaluations"])),
    t: nextTheme,
    "?": () => setHelp(!isHelp),
    ...(isHelp ? { Escape: () => setHelp(false) } : {}),
  });
  useEffect(() => {
    document.title = [...parts.slice().reverse(), page, run?.name].filter(Boolean).join(" · ");
    scrollTo(0, 0);
  }, [page, parts.join("/")]);
  const versions = state?.evaluations ?? {};

  if (run === null) return <main>{error ? <Absent>{error}</Absent> : <p class="waiting">reading …</p>}</main>;
  const status = isLive ? (lost ? "lost" : (state?.status ?? run.status.is)) : "exported";
  const holder = run.status.holder;
  const about = { running: "in progress; this page follows it", finished: "finished", stopped: "stopped; continue with --resume", elsewhere: `runs on ${holder?.host ?? "another machine"}, according to its lock`, lost: "the server does not answer", exported: `as of ${run.exported?.when ?? "its export"}` }[status];
  const pages: [string, string, string][] = [
    ...(run.is_run ? ([["run", "Run", ""], ["trees", "Trees", ""]] as [string, string, string][]) : []),
    ["evaluations", "Evaluations", ""],
  ];
  return (
    <>
      <header class="top">
        <a class="name" href={link([run.is_run ? "run" : "evaluations"])}>
          {run.name}
        </a>
        <span class={cx("status", `status-${status}`)} title={about}>
          <i aria-hidden="true" /> {status}
        </span>
        <nav aria-label="Pages">
          {pages.map(([key, title, count]) => (
            <a key={key} href={link([key])} aria-current={page === key ? "page" : undefined}>
              {title} {count && <span class="muted">{count}</span>}
            </a>
          ))}
        </nav>
        <span class="grow" />
        <button type="button" onClick={nextTheme} title="light, dark, or as the system (t)">
          {wanted}
        </button>
        <button type="button" onClick={() => setHelp(!isHelp)} aria-label="Keys" title="keys (?)">
          ?
        </button>
      </header>
      <main>
        {lost && <Absent>The server does not answer ({error}). What is shown stays.</Absent>}
        {run.exported !== undefined && run.exported.left_out.length > 0 && <Absent>Left out of this export: {run.exported.left_out.join("; ")}. agentenv view on the folder of the run shows all.</Absent>}
        {page === "run" && <RunPage run={run} rows={rows} unreadable={unreadable} theme={theme} version={state?.log ?? 0} />}
        {page === "trees" && parts.length < 2 && <TreesPage key={parts[0] ?? "all"} run={run} index={index.value ? index : lastIndex.current} step={parts[0] === undefined ? null : Number(parts[0])} query={route.query} theme={theme} version={parts[0] === String(state?.trees[1]) ? trees : 0} />}
        {page === "trees" && parts.length >= 2 && <TreePage step={parts[0] ?? ""} tree={parts[1] ?? ""} branch={parts[2]} query={route.query} version={trees} />}
        {page === "evaluations" && parts.length === 0 && <EvaluationsPage run={run} versions={versions} />}
        {page === "evaluations" && parts.length > 0 && <EvaluationPage key={parts[0]} run={run} parts={parts} query={route.query} theme={theme} versions={versions} />}
        {!["run", "trees", "evaluations"].includes(page) && <Absent>There is no page {page}.</Absent>}
      </main>
      {isHelp && (
        <div class="help" role="dialog" aria-label="Keys">
          <h2>Keys</h2>
          <dl>
            {HELP.map(([keys, what]) => (
              <>
                <dt>{keys}</dt>
                <dd>{what}</dd>
              </>
            ))}
          </dl>
          <button type="button" onClick={() => setHelp(false)}>
            close
          </button>
        </div>
      )}
    </>
  );
}

// Remove the used token from the history and from copied addresses.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);

const app = document.getElementById("app");
if (app !== null) render(<App />, app);

export { plural };
