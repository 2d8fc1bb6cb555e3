// Evaluations: their figures with intervals, two compared, rows and transcripts.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { Chart } from "./chart";
import { Cost, Scores, Spreads, Value, WithinK } from "./figures";
import { go, link } from "./route";
import { ask } from "./source";
import { type Column, Table } from "./table";
import { Calls, Text } from "./tree";
import type { Cell, Comparison, Difference, Estimate, EvalRow, EvaluationHead, EvaluationIndex, Run, Summary } from "./types";
import { Absent, Card, Interval, Search, Select, Tag, Tile, type Answer, Waiting, cx, num, percent, plural, seconds, useAnswer, useKeys } from "./ui";

function subjectOf(head: EvaluationHead): string {
  const { subject } = head;
  const parts = [subject["name"], subject["step"] !== undefined && `step ${String(subject["step"])}`, subject["policy_version"] !== undefined && `version ${String(subject["policy_version"])}`];
  return parts.filter(Boolean).join(", ");
}

export function EvaluationsPage(props: { run: Run; versions: Record<string, number> }) {
  const { run } = props;
  const heads = run.evaluations;
  const [found, setFound] = useState<Record<string, Summary | string>>({});
  const [first, setFirst] = useState(heads[0]?.id ?? "");
  const [second, setSecond] = useState(heads.at(-1)?.id ?? "");
  const key = JSON.stringify(props.versions);
  const known = useRef<Record<string, number | undefined>>({}); // the version of each one's figures
  useEffect(() => {
    let current = true;
    void (async () => {
      for (const { id } of [...heads].reverse()) {
        const version = props.versions[id];
        if (id in known.current && known.current[id] === version) continue;
        const value = await ask<Summary>(`evaluations/${id}/figures`).catch((error: Error) => error.message);
        if (!current) return;
        known.current[id] = version;
        setFound((old) => ({ ...old, [id]: value }));
      }
    })();
    return () => {
      current = false;
    };
  }, [key, heads.length]);
  if (heads.length === 0) return <Absent>No evaluation in this folder yet.</Absent>;
  return (
    <>
      <Card title="Evaluations, success with its 95 % interval">
        <div class="scroll">
          <table class="plain list">
            <thead>
              <tr>
                <th>evaluation</th>
                <th>of</th>
                <th class="right">questions</th>
                <th class="right">failed</th>
                <th>success</th>
                <th class="interval-cell" />
                <th class="right">reward</th>
                <th class="right">calls</th>
              </tr>
            </thead>
            <tbody>
              {heads.map((head) => {
                const summary = found[head.id];
                const of = typeof summary === "object" ? summary.overall : undefined;
                const success = of?.estimates["success"];
                return (
                  <tr key={head.id}>
                    <td>
                      <a href={link(["evaluations", head.id])}>{head.name}</a>
                    </td>
                    <td class="muted">{subjectOf(head)}</td>
                    <td class="right">{of ? num(of.num_questions) : typeof summary === "string" ? "" : "…"}</td>
                    <td class={cx("right", of && of.num_failed > 0 && "bad")}>{of ? num(of.num_failed) : ""}</td>
                    <td>{typeof summary === "string" ? <span class="muted">{summary}</span> : <Value of={success} />}</td>
                    <td class="interval-cell">{success && <Interval {...success} />}</td>
                    <td class="right">{num(of?.estimates["reward"]?.value)}</td>
                    <td class="right">{num(of?.estimates["tool_calls"]?.value, 2)}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      </Card>
      {heads.length > 1 && (
        <Card title="Compare two, question by question">
          <div class="filters">
            <Select label="A" value={first} options={heads.map((head) => [head.id, head.name])} onChange={setFirst} />
            <Select label="B" value={second} options={heads.map((head) => [head.id, head.name])} onChange={setSecond} />
            <a class="button" href={link(["evaluations", first, "against", second])}>
              compare
            </a>
          </div>
        </Card>
      )}
    </>
  );
}

function Counts(props: { title: string; counts: [string, string][] }) {
  if (props.counts.length === 0) return null;
  return (
    <div class="counts">
      <h3>{props.title}</h3>
      {props.counts.map(([name, count]) => (
        <div key={name} class="config-line">
          <span>{name}</span>
          <span>{count}</span>
        </div>
      ))}
    </div>
  );
}

function SummaryView(props: { summary: Summary; theme: string }) {
  const { summary, theme } = props;
  const { overall } = summary;
  const ks = Object.keys(overall.pass_at).map(Number).sort((a, b) => a - b);
  const agreement = overall.agreement;
  const curve = useMemo(() => {
    const of = (found: Record<string, Estimate>, name: "value" | "low" | "high") => ks.map((k) => found[k]?.[name] ?? null);
    return [overall.pass_at, overall.majority_at].map((found, i) => ({ label: i ? "maj@k" : "pass@k", values: of(found, "value"), low: of(found, "low"), high: of(found, "high"), points: true, dash: i > 0 })).filter((one) => one.values.some((value) => value !== null));
  }, [overall]);
  const success = overall.estimates["success"];
  const total = overall.num_trajectories + overall.num_failed;
  const share = (count: number) => `${num(count)} (${percent(count / total)})`;
  const isPlain = [overall.failures, overall.truncations, overall.tools].every((one) => Object.keys(one).length === 0) && !agreement;
  return (
    <>
      <div class="tiles">
        <Tile name="success" note={success ? `95 % [${num(success.low)}, ${num(success.high)}]` : undefined}>
          {num(success?.value)}
        </Tile>
        {ks.length > 1 && (
          <Tile name={`pass@${ks.at(-1)}`} note={`[${num(overall.pass_at[ks.at(-1) ?? 1]?.low)}, ${num(overall.pass_at[ks.at(-1) ?? 1]?.high)}]`}>
            {num(overall.pass_at[ks.at(-1) ?? 1]?.value)}
          </Tile>
        )}
        <Tile name="questions" note={plural(overall.num_trajectories, "graded trajectory", "graded trajectories")}>
          {num(overall.num_questions)}
        </Tile>
        <Tile name="failed" note={overall.num_failed > 0 ? `${percent(overall.num_failed / total)}; counted as wrong, success would be ${num(overall.success_if_failed_wrong)}` : overall.num_retries ? `${plural(overall.num_retries, "failed attempt")} retried` : "not counted as wrong"}>
          {num(overall.num_failed)}
        </Tile>
        <Tile name="tool calls each">{num(overall.spreads["tool_calls"]?.mean, 2)}</Tile>
        <Tile name="tokens each" note={`95 % below ${num(overall.spreads["action_tokens"]?.p95)}`}>
          {num(overall.spreads["action_tokens"]?.mean, 1)}
        </Tile>
        <Tile name="seconds, median">{num(overall.spreads["seconds"]?.median, 2)}</Tile>
      </div>
      {(overall.num_misformatted ?? 0) > 0 && (
        <p class="note">{plural(overall.num_misformatted ?? 0, "right answer")} (EM) fail the format that the grader demands, and count as wrong: agentenv evaluate regrade DIR grader.reward=answer</p>
      )}
      <Scores summary={summary} />
      {ks.length > 1 && <WithinK summary={summary} ks={ks} />}
      <Cost summary={summary} />
      <div class="panels">
        {ks.length > 1 && (
          <Card title="Pass@k and majority vote" class="panel">
            <Chart x={ks} series={curve} from={0} to={1} theme={theme} xLabel="k" log2 />
          </Card>
        )}
        <Card class={cx("panel", "counts-panel", ks.length <= 1 && "panel-all")}>
          <Counts title="Failed, excluded from scores" counts={Object.entries(overall.failures).map(([name, count]) => [name, share(count)])} />
          <Counts title="Truncated by a limit, graded as they are" counts={Object.entries(overall.truncations).map(([name, count]) => [name, share(count)])} />
          <Counts title="Tool calls and errors" counts={Object.entries(overall.tools).map(([name, use]) => [name, `${num(use.calls)}, ${num(use.errors)} (${percent(use.errors / use.calls)})`])} />
          <Counts title="Helpers, total" counts={Object.entries(overall.assist ?? {}).map(([name, count]) => [name, num(count)])} />
          {isPlain && <p class="muted">No failures, no truncations, no tool calls.</p>}
          {agreement && (
            <Counts
              title="Judge versus rules"
              counts={[
                ["agree", percent(agreement["share"])],
                ["Cohen's kappa", num(agreement["kappa"])],
                ["both correct", num(agreement["both_right"])],
                ["only the judge", num(agreement["only_judge"])],
                ["only the rules", num(agreement["only_rules"])],
                ["both wrong", num(agreement["both_wrong"])],
                ["replies without a verdict", num(agreement["num_unparsed"])],
              ]}
            />
          )}
        </Card>
      </div>
    </>
  );
}

interface Item {
  place: number;
  set: string;
  task: string;
  sample: number;
  kind: string;
  question: string;
  prediction: string;
  outcome: string;
  reward: number;
  limit: string | null;
  failure: string | null;
  calls: number;
  turns: number;
  sampled: number;
  seconds: number;
  judge: number | null;
}

function itemsOf(index: EvaluationIndex): Item[] {
  return index.rows.map((row, place) => {
    const [set, task, sample, kind, question, prediction, success, reward, end, limit, failure, calls, turns, sampled, took, judge] = row as [string, string, number, string, string, string, boolean, number, string, string | null, string | null, number, number, number, number, number | null] & Cell[];
    const outcome = end === "failed" ? "failed" : success ? "correct" : end === "truncated" ? "truncated" : "wrong";
    return { place, set, task, sample, kind, question, prediction, outcome, reward, limit, failure, calls, turns, sampled, seconds: took, judge };
  });
}

const KINDS: Record<string, string> = { correct: "good", wrong: "plain", truncated: "warn", failed: "bad" };

const COLUMNS: Column<Item>[] = [
  { key: "outcome", title: "outcome", width: "82px", cell: (one) => <Tag kind={KINDS[one.outcome]} title={one.limit ?? one.failure ?? ""}>{one.outcome}</Tag>, sort: (one) => one.outcome },
  { key: "set", title: "set", width: "84px", cell: (one) => one.set, sort: (one) => one.set },
  { key: "kind", title: "kind", width: "74px", cell: (one) => one.kind, sort: (one) => one.kind },
  { key: "task", title: "task", width: "104px", cell: (one) => `${one.task}${one.sample ? ` · ${one.sample}` : ""}`, sort: (one) => one.place },
  { key: "question", title: "question", width: "minmax(180px, 2fr)", cell: (one) => one.question, sort: (one) => one.question },
  { key: "prediction", title: "answer", width: "minmax(110px, 1fr)", cell: (one) => one.failure ?? one.prediction, sort: (one) => one.prediction },
  { key: "reward", title: "reward", width: "66px", align: "right", cell: (one) => num(one.reward, 2), sort: (one) => one.reward },
  { key: "judge", title: "judge", width: "56px", align: "right", cell: (one) => (one.judge === null ? "" : num(one.judge, 2)), sort: (one) => one.judge },
  { key: "calls", title: "calls", width: "54px", align: "right", cell: (one) => one.calls, sort: (one) => one.calls },
  { key: "sampled", title: "tokens", width: "64px", align: "right", cell: (one) => num(one.sampled), sort: (one) => one.sampled },
  { key: "seconds", title: "time", width: "66px", align: "right", cell: (one) => seconds(one.seconds), sort: (one) => one.seconds },
];

function Rows(props: { id: string; index: EvaluationIndex; query: URLSearchParams; current?: string }) {
  const { id, query } = props;
  const items = useMemo(() => itemsOf(props.index), [props.index]);
  const text = query.get("q") ?? "";
  const found = useAnswer<{ rows: number[]; num_searched: number; num_rows: number }>(text ? `evaluations/${id}/search` : null, { q: text });
  const set = (changed: Record<string, string>) => go(link(["evaluations", id], { ...Object.fromEntries(query), ...changed }), true);
  const filters = { outcome: query.get("outcome") ?? "", set: query.get("set") ?? "", kind: query.get("kind") ?? "" };
  const options = (name: "set" | "kind" | "outcome") => [["", "any"], ...[...new Set(items.map((one) => one[name]))].sort().map((one) => [one, one])] as [string, string][];
  const shown = useMemo(() => {
    const rows = text && found.value ? new Set(found.value.rows) : null;
    const wanted = text.toLowerCase();
    return items.filter((one) => (!filters.outcome || one.outcome === filters.outcome) && (!filters.set || one.set === filters.set) && (!filters.kind || one.kind === filters.kind) && (!text || (rows ? rows.has(one.place) : `${one.question} ${one.prediction}`.toLowerCase().includes(wanted))));
  }, [items, found.value, text, filters.outcome, filters.set, filters.kind]);
  return (
    <Card title="Trajectories">
      <div class="filters">
        <Select label="outcome" value={filters.outcome} options={options("outcome")} onChange={(outcome) => set({ outcome })} />
        <Select label="set" value={filters.set} options={options("set")} onChange={(value) => set({ set: value })} />
        <Select label="kind" value={filters.kind} options={options("kind")} onChange={(kind) => set({ kind })} />
        <Search label="text" value={text} placeholder="in questions, answers and trajectories" onChange={(q) => set({ q })} note={text && <span class="muted">{found.value ? (found.value.num_searched < found.value.num_rows ? `first ${found.value.num_searched} rows` : "") : found.error ? "questions and answers only" : "…"}</span>} />
      </div>
      {props.index.num_unreadable > 0 && <Absent>{plural(props.index.num_unreadable, "row")} could not be read.</Absent>}
      <Table label="Trajectories" columns={COLUMNS} rows={shown} href={(one) => link(["evaluations", id, one.place], Object.fromEntries(query))} rowKey={(one) => String(one.place)} current={props.current} />
    </Card>
  );
}

function Transcript(props: { row: EvalRow }) {
  const { row } = props;
  let turn = 0;
  let call = 0;
  return (
    <>
      <Card class="question">
        <p class="question-text">
          <Text text={row.question} />
        </p>
        <p class="small">
          <span class="muted">expected</span> <b>{row.answers.join(" or ")}</b> <span class="muted">answered</span> <b>{row.prediction || "nothing"}</b>
        </p>
        <div class="end">
          <Tag kind={row.end === "failed" ? "bad" : row.success ? "good" : "plain"}>{row.end === "failed" ? "failed" : row.success ? "correct" : "wrong"}</Tag>
          <span>
            reward <b>{num(row.reward, 3)}</b>
          </span>
          {row.limit && <span class="bad">truncated by the limit {row.limit.replace("_", " ")}</span>}
          {Object.entries(row.parts).map(([name, value]) => (
            <span key={name} class="muted">
              {name} {num(value, 2)}
            </span>
          ))}
          {Object.entries(row.scores).map(([name, value]) => (
            <span key={name} class="muted">
              {name.toUpperCase()} {num(value, 2)}
            </span>
          ))}
        </div>
        {row.reason && (
          <div class="observed">
            <div class="who">{"judge" in row.parts || "judge_unparsed" in row.parts ? "what the judge said" : "grader's verdict"}</div>
            <pre>
              <Text text={row.reason} />
            </pre>
          </div>
        )}
        {row.error && <p class="failure">{row.error}</p>}
        <p class="small muted">
          {plural(row.num_turns, "turn")}, {plural(row.action_tokens, "sampled token")}, {plural(row.tool_tokens, "token")} of results, {seconds(row.seconds)}
          {row.policy_versions.length > 0 && `, policy version ${[...new Set(row.policy_versions)].join(" to ")}`}
        </p>
      </Card>
      {row.segments.map((segment, i) => {
        const policy = segment["policy"];
        if (policy === undefined)
          return (
            <div key={i} class="observed turn">
              <div class="who">{i === 0 ? "prompt" : segment["role"] ?? "result, as shown to the policy"}</div>
              <pre>
                <Text text={segment["env"] ?? ""} />
              </pre>
            </div>
          );
        const answered = row.segments[i + 1]?.["env"] !== undefined && row.segments[i + 1]?.["role"] !== "user";
        const calls = answered && row.tool_calls[call] ? [row.tool_calls[call++] as EvalRow["tool_calls"][number]] : [];
        return (
          <section key={i} class="turn">
            <header class="turn-head">
              <b>turn {++turn}</b>
            </header>
            <div class="tokens">
              <Text text={policy} />
              {segment["eos"] && <span class="muted">{segment["eos"]}</span>}
            </div>
            <Calls calls={calls} />
          </section>
        );
      })}
    </>
  );
}

function RowPage(props: { id: string; place: number; index: EvaluationIndex; query: URLSearchParams }) {
  const { id, place, index } = props;
  const size = index.chunk;
  const chunk = useAnswer<EvalRow[]>(`evaluations/${id}/rows/${Math.floor(place / size)}`);
  const address = (to: number) => link(["evaluations", id, to], Object.fromEntries(props.query));
  const move = (by: number) => {
    if (index.rows[place + by] !== undefined) go(address(place + by));
  };
  useKeys({ j: () => move(1), k: () => move(-1), "]": () => move(1), "[": () => move(-1), Escape: () => go(link(["evaluations", id], Object.fromEntries(props.query))) });
  return (
    <>
      <div class="about">
        <a href={link(["evaluations", id], Object.fromEntries(props.query))}>{index.name}</a>
        <b>{String(index.rows[place]?.[1] ?? "")}</b>
        <span class="muted">sample {String(index.rows[place]?.[2] ?? "")}</span>
        <span class="row">
          <button type="button" disabled={place <= 0} onClick={() => move(-1)} aria-label="previous row">
            ‹
          </button>
          <button type="button" disabled={place + 1 >= index.rows.length} onClick={() => move(1)} aria-label="next row">
            ›
          </button>
        </span>
        <Tag kind="plain">{String(index.rows[place]?.[3] ?? "")}</Tag>
      </div>
      <Waiting answer={chunk}>{(rows) => (rows[place % size] ? <Transcript row={rows[place % size] as EvalRow} /> : <Absent>No such row.</Absent>)}</Waiting>
    </>
  );
}

function Change(props: { of: Difference; name: string }) {
  const { of } = props;
  const sure = of.low !== null && of.high !== null && (of.low > 0 || of.high < 0);
  return (
    <tr>
      <td>{props.name}</td>
      <td class="right">{num(of.num_questions)}</td>
      <td class="right">{num(of.first)}</td>
      <td class="right">{num(of.second)}</td>
      <td class={cx("right", sure && (of.difference > 0 ? "good" : "bad"))}>
        {of.difference > 0 && "+"}
        {num(of.difference)}
      </td>
      <td class="muted">{of.low !== null && `[${num(of.low)}, ${num(of.high)}]`}</td>
      <td class="right">{num(of.p)}</td>
      <td class="muted">{of.test}</td>
    </tr>
  );
}

function ComparePage(props: { run: Run; first: string; second: string; versions: Record<string, number> }) {
  const { first, second, run } = props;
  const answer = useAnswer<Comparison>(`compare/${first}/${second}`, {}, `${props.versions[first]} ${props.versions[second]}`);
  const [indexA, indexB] = [useAnswer<EvaluationIndex>(`evaluations/${first}`), useAnswer<EvaluationIndex>(`evaluations/${second}`)];
  const name = (id: string) => run.evaluations.find((head) => head.id === id)?.name ?? id;
  const at = (index: Answer<EvaluationIndex>, set: string, task: string) => index.value?.rows.findIndex((row) => row[0] === set && row[1] === task) ?? -1;
  return (
    <>
      <div class="about">
        <a href={link(["evaluations", first])}>A: {name(first)}</a> <span class="muted">versus</span> <a href={link(["evaluations", second])}>B: {name(second)}</a>
        <a class="small" href={link(["evaluations", second, "against", first])}>
          swap
        </a>
      </div>
      <Waiting answer={answer}>
        {(found) => (
          <>
            <Card title={`${plural(found.num_questions, "question")} in both`} aside={<span class="muted small">only in A {found.only_first}, only in B {found.only_second}, failed in one {found.failed}</span>}>
              <div class="scroll">
                <table class="plain list">
                  <thead>
                    <tr>
                      <th>figure</th>
                      <th class="right">questions</th>
                      <th class="right">A</th>
                      <th class="right">B</th>
                      <th class="right">B − A</th>
                      <th>95 %</th>
                      <th class="right">p</th>
                      <th>test</th>
                    </tr>
                  </thead>
                  <tbody>
                    {found.success.map(([set, of]) => (
                      <Change key={set} of={of} name={`success, ${set}`} />
                    ))}
                    {found.sides.some((side) => side.num_failed > 0) && (
                      <>
                        <tr>
                          <td>share of failed samples</td>
                          <td class="right">{num(found.num_questions + found.failed)}</td>
                          {found.sides.map((side, i) => (
                            <td key={i} class={cx("right", side.num_failed > 0 && "bad")}>
                              {percent(side.num_failed / side.num_samples)}
                            </td>
                          ))}
                          <td colSpan={4} />
                        </tr>
                        <tr>
                          <td>success, failed as wrong</td>
                          <td class="right">{num(found.num_questions + found.failed)}</td>
                          {found.sides.map((side, i) => (
                            <td key={i} class="right">
                              {num(side.success_if_wrong)}
                            </td>
                          ))}
                          <td colSpan={4} />
                        </tr>
                      </>
                    )}
                    {found.others.map((of) => (
                      <Change key={of.name} of={of} name={of.name} />
                    ))}
                  </tbody>
                </table>
              </div>
            </Card>
            <Card title={`${plural(found.num_changed, "question")} changed`} aside={found.changed.length < found.num_changed && <span class="muted small">the {found.changed.length} that changed most</span>}>
              <div class="scroll">
                <table class="plain list">
                  <thead>
                    <tr>
                      <th class="right">change</th>
                      <th>kind</th>
                      <th>question</th>
                      <th>A answered</th>
                      <th>B answered</th>
                    </tr>
                  </thead>
                  <tbody>
                    {found.changed.map((one) => (
                      <tr key={`${one.set} ${one.task}`}>
                        <td class={cx("right", one.change > 0 ? "good" : "bad")}>
                          {one.change > 0 && "+"}
                          {num(one.change, 2)}
                        </td>
                        <td>{one.kind}</td>
                        <td class="wide">{one.question}</td>
                        <td>
                          <a href={link(["evaluations", first, Math.max(0, at(indexA, one.set, one.task))])}>{one.first || "nothing"}</a>
                        </td>
                        <td>
                          <a href={link(["evaluations", second, Math.max(0, at(indexB, one.set, one.task))])}>{one.second || "nothing"}</a>
                        </td>
                      </tr>
                    ))}
                  </tbody>
                </table>
              </div>
            </Card>
          </>
        )}
      </Waiting>
    </>
  );
}

export function EvaluationPage(props: { run: Run; parts: string[]; query: URLSearchParams; theme: string; versions: Record<string, number> }) {
  const [id = "", second, third] = props.parts;
  const version = props.versions[id];
  const index = useAnswer<EvaluationIndex>(`evaluations/${id}`, {}, version);
  const figures = useAnswer<Summary>(second === undefined && index.value !== undefined ? `evaluations/${id}/figures` : null, {}, version);
  if (second === "against" && third !== undefined) return <ComparePage run={props.run} first={id} second={third} versions={props.versions} />;
  if (second !== undefined) return <Waiting answer={index}>{(value) => <RowPage id={id} place={Number(second)} index={value} query={props.query} />}</Waiting>;
  return (
    <Waiting answer={index}>
      {(value) => (
        <>
          <div class="about">
            <a href={link(["evaluations"])}>evaluations</a>
            <b>{value.name}</b>
            <span class="muted">{subjectOf(value)}</span>
            <span class="muted">{value.folder}</span>
          </div>
          <Waiting answer={figures}>{(summary) => <SummaryView summary={summary} theme={props.theme} />}</Waiting>
          <Spreads index={value} />
          <Rows id={id} index={value} query={props.query} />
        </>
      )}
    </Waiting>
  );
}
