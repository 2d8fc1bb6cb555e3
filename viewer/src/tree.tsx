// One tree: its drawing, one branch token by token, two branches side by side.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { MODES, type Scale, differing, gapOf, legendOf, scaleOf, signs, tone, versionOf } from "./colors";
import { Drawing, above, childrenOf, pathTo, returnOf } from "./drawing";
import { go, link } from "./route";
import type { Call, Node, Row, Tree } from "./types";
import { Absent, Card, Select, Tag, Waiting, cx, num, plural, seconds, useAnswer, useKeys } from "./ui";

const LONG = 1200; // characters of a text that is folded

export function leavesOf(tree: Tree): Node[] {
  return tree.nodes.filter((node) => node.end !== null);
}

/** An untrusted text, complete, folded if it is long. */
export function Text(props: { text: string; class?: string }) {
  const [isOpen, setOpen] = useState(false);
  const { text } = props;
  if (text.length <= LONG || isOpen) return <span class={props.class}>{text}</span>;
  return (
    <span class={props.class}>
      {text.slice(0, LONG / 2)}
      <button type="button" class="unfold" onClick={() => setOpen(true)}>
        {plural(text.length - LONG, "character")} more
      </button>
      {text.slice(-LONG / 2)}
    </span>
  );
}

function plain(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
}

export function Calls(props: { calls: Call[] }) {
  return (
    <>
      {props.calls.map((call, i) => {
        const isCached = call.info?.["cached"] === true;
        const values = call.arguments !== null && typeof call.arguments === "object" ? Object.entries(call.arguments as Row) : [["", call.arguments]];
        return (
          <div key={i} class="call">
            <div class="call-head">
              <Tag kind={call.ok === false ? "bad" : "tool"}>{call.name}</Tag>
              {call.duration_s !== undefined && <span>{seconds(call.duration_s)}</span>}
              {Boolean(call.waited_s) && <span class="muted">of which {seconds(call.waited_s)} waiting</span>}
              {isCached && <Tag kind="good">from the cache</Tag>}
              {call.info?.["cached"] === false && <span class="muted">not cached</span>}
              {call.ok === false && <span class="bad">{call.error ?? "raised"}</span>}
            </div>
            {values.map(([name, value]) => (
              <div key={String(name)} class="call-argument">
                {name && <span class="muted">{String(name)}</span>}
                <pre>
                  <Text text={plain(value)} />
                </pre>
              </div>
            ))}
          </div>
        );
      })}
    </>
  );
}

interface TurnProps {
  tree: Tree;
  node: Node;
  number: number;
  scale: Scale;
  marked?: Set<number>;
  branch: string;
  links: (branch: string) => string;
  beside: (branch: string) => string;
}

function Tokens(props: { node: Node; scale: Scale; marked?: Set<number> }) {
  const { node, scale, marked } = props;
  return useMemo(
    () => (
      <div class="tokens">
        {node.texts.map((text, i) => (
          <span key={i} class={cx("t", tone(scale, node, i), marked?.has(i) && "differs")} data-n={node.index} data-i={i}>
            {text}
          </span>
        ))}
      </div>
    ),
    [node, scale, marked],
  );
}

function Turn(props: TurnProps) {
  const { tree, node, number, scale } = props;
  const siblings = useMemo(() => {
    const own = childrenOf(tree).get(node.index) ?? [];
    const below = childrenOf(tree);
    const end = (one: Node): Node => {
      let at = one;
      for (let next = below.get(at.index); at.end === null && next?.[0]; next = below.get(at.index)) at = next[0];
      return at;
    };
    return own.length > 1 ? own.map((one) => ({ leaf: end(one), from: one })) : [];
  }, [tree, node]);
  const versions = [...new Set(node.versions.map(([version]) => version))];
  const isRoot = node.ids.length === 0;
  return (
    <section class={cx("turn", node.end && `turn-${node.end}`)} id={`node-${node.index}`}>
      <header class="turn-head">
        <b>{isRoot ? (node.continues === null ? "prompt" : "continues in a separate context") : `turn ${number}`}</b>
        <span class="muted">node {node.index}</span>
        {!isRoot && <span>{plural(node.ids.length, "token")}</span>}
        {node.num_observed > 0 && <span class="muted">{plural(node.num_observed, "token")} observed</span>}
        {versions.length > 0 && <span class="muted">version {versions.join(", ")}</span>}
        {!isRoot && node.adv_pos !== undefined && (
          <span title="sums of the advantages of the trajectories that share this turn">
            advantage {node.adv_pos > 0 && <span class="good">+{num(node.adv_pos, 2)}</span>} {(node.adv_neg ?? 0) < 0 && <span class="bad">{num(node.adv_neg, 2)}</span>}
            {node.adv_pos === 0 && node.adv_neg === 0 && "0"}
          </span>
        )}
        {node.reward !== 0 && node.end === null && <span title="of this step; the return is the sum along the path">reward {num(node.reward, 2)}</span>}
        {!isRoot && (node.weight ?? 0) > 1 && <span class="muted">shared by {num(node.weight)}</span>}
      </header>
      {!isRoot && <Tokens node={node} scale={scale} marked={props.marked} />}
      {node.calls.length > 0 && <Calls calls={node.calls} />}
      {node.observation !== "" && (
        <div class={cx("observed", scale.mode === "mask" && "m-observed")}>
          <div class="who">{isRoot ? "prompt" : node.calls.length ? "result, as shown to the policy" : node.info["user_messages"] ? "user" : "environment"}</div>
          <pre>
            <Text text={node.observation} />
          </pre>
        </div>
      )}
      {node.error && <p class="failure">{node.error}</p>}
      {node.end !== null && <End tree={tree} leaf={node} />}
      {node.num_forks !== null && (
        <div class="forks">
          <span class="fork-dot" aria-hidden="true" />
          {node.num_forks > 0 ? `The plan forked ${plural(node.num_forks, "sibling")} here.` : "The plan did not fork here."}
        </div>
      )}
      {siblings.length > 1 && (
        <div class="siblings">
          {siblings.map(({ leaf, from }) => (
            <span key={from.index} class={cx("sibling", leaf.branch === props.branch && "sibling-own")}>
              <a href={props.links(leaf.branch)}>
                {from.branch === node.branch && node.ids.length > 0 ? "continues as" : "branch"} {leaf.branch}
              </a>
              <span class={cx(returnOf(tree, leaf) > 0 ? "good" : "bad")}>{leaf.end === "failed" ? "failed" : `returns ${num(returnOf(tree, leaf), 2)}`}</span>
              {leaf.branch !== props.branch && (
                <a class="small" href={props.beside(leaf.branch)}>
                  beside
                </a>
              )}
            </span>
          ))}
        </div>
      )}
    </section>
  );
}

function End(props: { tree: Tree; leaf: Node }) {
  const { tree, leaf } = props;
  const parts = Object.entries((leaf.info["parts"] ?? {}) as Record<string, number>);
  const reason = leaf.info["reason"];
  return (
    <div class="end">
      <Tag kind={leaf.end === "failed" ? "bad" : leaf.info["success"] ? "good" : "plain"}>{leaf.end === "failed" ? "failed" : leaf.info["success"] ? "correct" : "wrong"}</Tag>
      <span>
        return <b>{num(returnOf(tree, leaf), 3)}</b>
      </span>
      {typeof leaf.advantage === "number" && (
        <span>
          advantage <b class={leaf.advantage > 0 ? "good" : leaf.advantage < 0 ? "bad" : ""}>{num(leaf.advantage, 3)}</b>
        </span>
      )}
      {leaf.end === "truncated" && <span class="bad">truncated by the limit {(leaf.limit ?? "").replace("_", " ")}</span>}
      {parts.map(([name, value]) => (
        <span key={name} class="muted">
          {name} {num(value, 2)}
        </span>
      ))}
      {Object.entries(leaf.noted).map(([name, count]) => (
        <span key={name} class={name.startsWith("refused/") ? "bad" : "muted"} title="of the program's calls">
          {name} {num(count)}
        </span>
      ))}
      {typeof reason === "string" && reason !== "" && <span class="reason">{reason}</span>}
    </div>
  );
}

/** Details of one token. */
function Detail(props: { tree: Tree; at: { node: number; i: number } | null }) {
  const { tree, at } = props;
  const node = at === null ? undefined : tree.nodes[at.node];
  if (at === null || node === undefined || node.ids[at.i] === undefined)
    return (
      <div class="detail muted" role="status">
        Point at a token, or click one and move with the arrow keys.
      </div>
    );
  const i = at.i;
  const version = versionOf(tree, node, i);
  const nats = (gap: number | null) => (gap === null ? "–" : `${gap > 0 ? "+" : ""}${num(gap, 4)}`);
  const logprob = node.logprobs[i];
  const pairs: [string, string][] = [
    ["token", `${node.ids[i]}`],
    ["p", typeof logprob === "number" ? num(Math.exp(logprob)) : "–"],
    ["engine", `${num(logprob)} nats`],
    ["learner", typeof node.learner[i] === "number" ? `${num(node.learner[i])} nats` : "not trained"],
    ["gap", nats(gapOf(node, i))],
    ...(node.teacher.length ? [["teacher − policy", nats(gapOf(node, i, "teacher"))] as [string, string]] : []),
    ["before the update", typeof node.proximal[i] === "number" ? num(node.proximal[i]) : "–"],
    ["entropy", typeof node.entropies[i] === "number" ? `${num(node.entropies[i])} nats` : "–"],
    ["version", `${version}${tree.learner_version - version > 0 ? `, ${tree.learner_version - version} old` : ""}`],
    ["advantage", node.adv_pos === undefined ? "–" : `+${num(node.adv_pos, 2)} ${num(node.adv_neg, 2)}`],
    ["trained by", node.weight === undefined || tree.fate !== "trained" ? "none" : plural(node.weight, "trajectory", "trajectories")],
  ];
  return (
    <div class="detail" role="status">
      <code class="detail-token">{JSON.stringify(node.texts[i] ?? "").slice(1, -1)}</code>
      {pairs.map(([name, value]) => (
        <span key={name}>
          <span class="muted">{name}</span> {value}
        </span>
      ))}
    </div>
  );
}

function Why(props: { tree: Tree }) {
  const { tree } = props;
  const failed = leavesOf(tree).filter((leaf) => leaf.end === "failed");
  const kinds = new Map<string, number>();
  for (const leaf of failed) kinds.set(leaf.error ?? "unknown", (kinds.get(leaf.error ?? "unknown") ?? 0) + 1);
  const returns = [...new Set(leavesOf(tree).filter((leaf) => leaf.end !== "failed").map((leaf) => returnOf(tree, leaf)))];
  return (
    <div class={cx("why", `why-${tree.fate}`)}>
      {tree.fate === "trained" && !tree.why && <span>Trained in step {tree.step}.</span>}
      {(tree.fate === "filtered" || (tree.fate === "trained" && tree.why)) && (
        <span>
          {tree.fate === "filtered" ? "Filtered, not trained" : `Counted in the means of step ${tree.step}, without a signal`}: {tree.why || "no signal"}.{" "}
          {returns.length === 1 ? `Each trajectory returned ${num(returns[0], 2)}, so that every advantage is 0.` : ""}
        </span>
      )}
      {tree.fate === "failed" && <span>Failed, not trained: {tree.why || "too few trajectories ended"}.</span>}
      {failed.length > 0 && (
        <ul>
          {[...kinds].map(([error, count]) => (
            <li key={error}>
              {count > 1 && `${count} × `}
              <span class="failure">{error}</span>
            </li>
          ))}
        </ul>
      )}
      {tree.num_retries + tree.num_retaken > 0 && (
        <span class="muted">
          {" "}
          {plural(tree.num_retries, "failure")} replaced by a fresh root, {plural(tree.num_retaken, "turn")} taken again.
        </span>
      )}
    </div>
  );
}

function Figures(props: { tree: Tree; leaves: [Node, Node] }) {
  const { tree, leaves } = props;
  const rows: [string, (leaf: Node) => string][] = [
    ["return", (leaf) => num(returnOf(tree, leaf), 3)],
    ["advantage", (leaf) => num(leaf.advantage, 3)],
    ["ended", (leaf) => `${leaf.end}${leaf.limit ? ` by ${leaf.limit}` : ""}`],
    ["turns", (leaf) => num(pathTo(tree, leaf).filter((node) => node.ids.length > 0).length)],
    ["sampled tokens", (leaf) => num(pathTo(tree, leaf).reduce((sum, node) => sum + node.ids.length, 0))],
    ["tool calls", (leaf) => pathTo(tree, leaf).flatMap((node) => node.calls.map((call) => call.name)).join(", ") || "none"],
    ["reason", (leaf) => String(leaf.info["reason"] ?? "")],
  ];
  return (
    <table class="plain">
      <thead>
        <tr>
          <th />
          {leaves.map((leaf) => (
            <th key={leaf.branch}>{leaf.branch}</th>
          ))}
        </tr>
      </thead>
      <tbody>
        {rows.map(([name, of]) => {
          const values = leaves.map(of);
          return (
            <tr key={name} class={values[0] !== values[1] ? "row-differs" : undefined}>
              <th>{name}</th>
              {values.map((value, i) => (
                <td key={i}>{value}</td>
              ))}
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

/** The branch with the longest shared prefix: for a fork its parent branch. */
function nearest(tree: Tree, leaves: Node[], leaf: Node): Node | undefined {
  const path = new Set(pathTo(tree, leaf));
  const shared = (one: Node) => pathTo(tree, one).filter((node) => path.has(node)).length;
  return leaves.filter((one) => one !== leaf).sort((a, b) => shared(b) - shared(a))[0];
}

function View(props: { tree: Tree; branch: string | undefined; query: URLSearchParams }) {
  const { tree, query } = props;
  const leaves = leavesOf(tree);
  const leaf = leaves.find((one) => one.branch === props.branch) ?? leaves[0];
  const color = query.get("color") ?? (tree.has_credit ? "advantage" : "entropy");
  const second = leaves.find((one) => one.branch === query.get("beside") && one !== leaf);
  const scale = useMemo(() => scaleOf(tree, color), [tree, color]);
  const [pointed, setPointed] = useState<{ node: number; i: number } | null>(null);
  const [chosen, setChosen] = useState<{ node: number; i: number } | null>(null);
  const page = useRef<HTMLDivElement>(null);
  const address = (branch: string | undefined, changed: Record<string, string | undefined> = {}) => link(["trees", tree.step, tree.tree, ...(branch === undefined ? [] : [branch])], { ...Object.fromEntries(query), ...changed });

  const path = useMemo(() => (leaf ? pathTo(tree, leaf) : tree.nodes.slice(0, 1)), [tree, leaf]);
  const other = useMemo(() => (second ? pathTo(tree, second) : []), [tree, second]);
  const shared = second ? path.filter((node) => other.includes(node)).length : 0;
  const marks = useMemo(() => {
    const found = new Map<Node, Set<number>>();
    if (!second) return found;
    for (let i = shared; i < Math.max(path.length, other.length); i++) {
      const [a, b] = [path[i], other[i]];
      if (a) found.set(a, differing(a.ids, b?.ids ?? []));
      if (b) found.set(b, differing(b.ids, a?.ids ?? []));
    }
    return found;
  }, [path, other, shared]);

  useEffect(() => {
    setChosen(null);
    setPointed(null);
  }, [tree]);
  useEffect(() => {
    const old = page.current?.querySelectorAll(".t.chosen");
    old?.forEach((one) => one.classList.remove("chosen"));
    if (chosen === null) return;
    const token = page.current?.querySelector(`.t[data-n="${chosen.node}"][data-i="${chosen.i}"]`);
    token?.classList.add("chosen");
    token?.scrollIntoView({ block: "nearest" });
  }, [chosen, path, color]);

  const tokenAt = (event: Event) => {
    const { n, i } = (event.target as HTMLElement).dataset;
    return n === undefined || i === undefined ? null : { node: Number(n), i: Number(i) };
  };
  const moveToken = (by: number) => {
    const all = [...path, ...other.slice(shared)].flatMap((node) => node.ids.map((_, i) => ({ node: node.index, i })));
    setChosen((old) => {
      // from where the key before has led, also if that is not drawn yet
      const at = old === null ? -1 : all.findIndex((one) => one.node === old.node && one.i === old.i);
      return all[Math.min(all.length - 1, Math.max(0, at + by))] ?? null;
    });
    setPointed(null);
  };
  const moveBranch = (by: number) => {
    const at = leaves.findIndex((one) => one === leaf);
    const next = leaves[(at + by + leaves.length) % leaves.length];
    if (next) go(address(next.branch));
  };
  const moveTree = (by: number) => {
    const next = tree.trees[tree.trees.indexOf(tree.tree) + by];
    if (next !== undefined) go(link(["trees", tree.step, next], { color: query.get("color") ?? undefined }));
  };
  const mode = (by: number) => {
    const at = MODES.findIndex(([key]) => key === color);
    go(address(leaf?.branch, { color: MODES[(at + by + MODES.length) % MODES.length]?.[0] }), true);
  };
  useKeys({
    ArrowRight: () => moveToken(1),
    ArrowLeft: () => moveToken(-1),
    j: () => moveBranch(1),
    k: () => moveBranch(-1),
    "]": () => moveTree(1),
    "[": () => moveTree(-1),
    c: () => mode(1),
    C: () => mode(-1),
    b: () => {
      const sibling = leaf && nearest(tree, leaves, leaf);
      go(address(leaf?.branch, { beside: second ? undefined : sibling?.branch }), true);
    },
    Escape: () => (second ? go(address(leaf?.branch, { beside: undefined }), true) : go(link(["trees", tree.step]))),
  });

  const number = (node: Node) => path.concat(other).includes(node) ? pathTo(tree, node).filter((one) => one.ids.length > 0).length : 0;
  const turn = (node: Node) => (
    <Turn key={node.index} tree={tree} node={node} number={number(node)} scale={scale} marked={marks.get(node)} branch={leaf?.branch ?? ""} links={(branch) => address(branch, { beside: undefined })} beside={(branch) => address(leaf?.branch, { beside: branch })} />
  );
  const place = tree.trees.indexOf(tree.tree);
  const sharedTokens = path.slice(0, shared).reduce((sum, node) => sum + node.ids.length + node.num_observed, 0);

  return (
    <div ref={page} onPointerOver={(event) => setPointed(tokenAt(event))} onPointerLeave={() => setPointed(null)} onClick={(event) => tokenAt(event) && setChosen(tokenAt(event))}>
      <div class="about">
        <a href={link(["trees", tree.step])}>step {tree.step}</a>
        <b>tree {tree.tree}</b>
        <span class="row">
          <button type="button" disabled={place <= 0} onClick={() => moveTree(-1)} aria-label="previous tree">
            ‹
          </button>
          <button type="button" disabled={place < 0 || place + 1 >= tree.trees.length} onClick={() => moveTree(1)} aria-label="next tree">
            ›
          </button>
        </span>
        <Tag kind={tree.fate === "trained" ? "good" : tree.fate === "failed" ? "bad" : "plain"}>{tree.fate}</Tag>
        <Tag kind="plain">{tree.task.kind}</Tag>
        <span class="muted">{tree.task.env}</span>
        <span class="muted">{tree.task.id}</span>
      </div>
      <Card class="question">
        <p class="question-text">
          <Text text={tree.task.question} />
        </p>
        <p class="small">
          <span class="muted">expected</span> <b>{tree.task.answers.join(" or ")}</b>
        </p>
        <Why tree={tree} />
        <p class="small muted">
          {plural(leaves.length, "trajectory", "trajectories")}, {plural(tree.num_roots, "root")}, {plural(tree.num_forks, "fork")}; {plural(tree.num_tokens, "token")}, of them {num(tree.num_sampled)} sampled; began under version {tree.policy_version}, the learner was at {tree.learner_version}
        </p>
      </Card>
      {!tree.has_texts && <Absent>No tokenizer.json in the run, its checkpoints or its model: tokens are shown as ids.</Absent>}
      <Card title="Forks" aside={<span class="muted small"><span class="fork-dot" aria-hidden="true" /> is a fork; click a branch to open it</span>}>
        <Drawing tree={tree} scale={scale} branch={leaf?.branch ?? ""} beside={second?.branch ?? ""} color={query.get("color") ?? ""} />
      </Card>
      <div class="bar">
        <Select label="branch" value={leaf?.branch ?? ""} options={leaves.map((one) => [one.branch, `${one.branch}: ${one.end === "failed" ? "failed" : `returns ${num(returnOf(tree, one), 2)}`}`])} onChange={(branch) => go(address(branch))} />
        <Select label="beside" value={second?.branch ?? ""} options={[["", "nothing"], ...leaves.filter((one) => one !== leaf).map((one) => [one.branch, `${one.branch}: ${one.end === "failed" ? "failed" : `returns ${num(returnOf(tree, one), 2)}`}`] as [string, string])]} onChange={(beside) => go(address(leaf?.branch, { beside }), true)} />
        <Select label="color by" value={color} options={MODES.map(([key, name]) => [key, name])} onChange={(color) => go(address(leaf?.branch, { color }), true)} />
        <span class="legend-line small">
          {legendOf(scale).map(([name, text]) => (
            <span key={text} class="legend">
              <i class={cx("swatch", name)} /> {text}
            </span>
          ))}
          {color === "teacher" && !tree.nodes.some((node) => node.teacher.length) && <span class="muted">no teacher scored it</span>}
          {color === "gap" && !tree.has_learner && <span class="muted">not yet seen by the learner</span>}
          {color === "advantage" && !tree.has_credit && <span class="muted">no credit: too few trajectories counted</span>}
        </span>
      </div>
      {second && leaf ? (
        <>
          <Card>
            <Figures tree={tree} leaves={[leaf, second]} />
          </Card>
          <details class="shared">
            <summary>
              shared: {plural(shared, "node")}, {plural(sharedTokens, "token")}
            </summary>
            {path.slice(0, shared).map(turn)}
          </details>
          <div class="columns">
            <div>{path.slice(shared).map(turn)}</div>
            <div>{other.slice(shared).map(turn)}</div>
          </div>
        </>
      ) : (
        path.map(turn)
      )}
      <Detail tree={tree} at={pointed ?? chosen} />
    </div>
  );
}

export function TreePage(props: { step: string; tree: string; branch: string | undefined; query: URLSearchParams; version: unknown }) {
  const answer = useAnswer<Tree>(`steps/${props.step}/trees/${props.tree}`);
  return <Waiting answer={answer}>{(tree) => <View tree={tree} branch={props.branch} query={props.query} />}</Waiting>;
}

export { above, signs };
