// The drawing of a tree: a lane for each trajectory, forks as curves that leave their turn.

import { link } from "./route";
import { boxTone, type Scale } from "./colors";
import type { Node, Tree } from "./types";
import { cx, num } from "./ui";

const COLUMN = 104;
const LANE = 38;
const WIDE = 78;
const HIGH = 22;
const TOP = 8;

export const above = (node: Node): number | null => node.parent ?? node.continues;

export function childrenOf(tree: Tree): Map<number | null, Node[]> {
  const found = new Map<number | null, Node[]>();
  for (const node of tree.nodes) {
    const key = above(node);
    found.set(key, [...(found.get(key) ?? []), node]);
  }
  return found;
}

export function pathTo(tree: Tree, leaf: Node): Node[] {
  const path = [leaf];
  for (let at = above(leaf); at !== null; ) {
    const node = tree.nodes[at];
    if (node === undefined) break;
    path.unshift(node);
    at = above(node);
  }
  return path;
}

export function returnOf(tree: Tree, leaf: Node): number {
  return pathTo(tree, leaf).reduce((sum, node) => sum + node.reward, 0);
}

interface Place {
  node: Node;
  x: number;
  lane: number;
}

export function placesOf(tree: Tree): { places: Map<number, Place>; lanes: number; depth: number } {
  const children = childrenOf(tree);
  const places = new Map<number, Place>();
  let lanes = 0;
  let depth = 0;
  const stack: { node: Node; x: number; lane: number | null }[] = [...(children.get(null) ?? [])].reverse().map((node) => ({ node, x: 0, lane: null }));
  while (stack.length > 0) {
    const { node, x, lane } = stack.pop() as { node: Node; x: number; lane: number | null };
    const own = lane ?? lanes++;
    places.set(node.index, { node, x, lane: own });
    depth = Math.max(depth, x);
    const below = [...(children.get(node.index) ?? [])];
    // the trajectory itself goes straight on, what forks off comes below it
    below.sort((a, b) => Number(b.branch === node.branch) - Number(a.branch === node.branch) || a.index - b.index);
    below.reverse().forEach((child, i) => stack.push({ node: child, x: x + 1, lane: i === below.length - 1 ? own : null }));
  }
  return { places, lanes, depth };
}

export function Drawing(props: { tree: Tree; scale: Scale; branch: string; beside: string; color: string }) {
  const { tree, scale } = props;
  const { places, lanes, depth } = placesOf(tree);
  const [width, height] = [(depth + 1) * COLUMN + 150, lanes * LANE + TOP * 2];
  const leafOf = (branch: string) => tree.nodes.find((node) => node.end !== null && node.branch === branch);
  const shown = new Set<number>();
  const other = new Set<number>();
  const [leaf, second] = [leafOf(props.branch), leafOf(props.beside)];
  if (leaf) for (const node of pathTo(tree, leaf)) shown.add(node.index);
  if (second) for (const node of pathTo(tree, second)) other.add(node.index);
  const target = (node: Node): string => {
    let at: Node = node;
    const below = childrenOf(tree);
    while (at.end === null) {
      const next = (below.get(at.index) ?? []).find((one) => shown.has(one.index)) ?? (below.get(at.index) ?? [])[0];
      if (next === undefined) break;
      at = next;
    }
    return at.branch;
  };
  const all = [...places.values()];
  return (
    <div class="drawing" tabIndex={-1}>
      <svg width={width} height={height} role="group" aria-label="The trajectories of this tree">
        {all.map(({ node, x, lane }) => {
          const from = places.get(above(node) ?? -1);
          if (from === undefined) return null;
          const [x1, y1, x2, y2] = [from.x * COLUMN + WIDE, from.lane * LANE + TOP + HIGH / 2, x * COLUMN, lane * LANE + TOP + HIGH / 2];
          const isFork = node.branch.includes("+") && from.node.branch !== node.branch;
          return <path key={`e${node.index}`} data-node={node.index} class={cx("edge", isFork && "edge-fork", node.continues !== null && "edge-goes-on", shown.has(node.index) && "edge-shown")} d={`M${x1},${y1} C${x1 + 18},${y1} ${x2 - 18},${y2} ${x2},${y2}`} />;
        })}
        {all.map(({ node, x, lane }) => {
          const [left, top] = [x * COLUMN, lane * LANE + TOP];
          const name = node.parent === null && node.ids.length === 0 ? "prompt" : (node.calls[0]?.name ?? (node.end && node.end !== "failed" ? "answer" : `turn ${x}`));
          const reward = node.end === null ? null : returnOf(tree, node);
          return (
            <a key={node.index} data-node={node.index} data-above={above(node)} class="node-link" href={link(["trees", tree.step, tree.tree, target(node)], { color: props.color, beside: props.beside })} aria-label={`${name}, branch ${node.branch || "root"}, ${node.ids.length} tokens${node.end ? `, ${node.end}, return ${num(reward, 2)}` : ""}`}>
              <g class={cx("node", shown.has(node.index) && "node-shown", other.has(node.index) && "node-other", node.end === "failed" && "node-failed")}>
                <title>{`node ${node.index}, branch ${node.branch || "root"}: ${node.ids.length} sampled, ${node.num_observed} observed tokens${node.num_forks !== null ? `; the plan was asked here and forked ${node.num_forks}` : ""}`}</title>
                <rect class="node-box" x={left} y={top} width={WIDE} height={HIGH} rx="5" />
                <rect class={cx("node-heat", boxTone(scale, node))} x={left + 1.5} y={top + HIGH - 5} width={WIDE - 3} height="3.5" rx="1.5" />
                <text x={left + 7} y={top + 13}>
                  {name.length > 11 ? `${name.slice(0, 10)}…` : name}
                </text>
                {node.num_forks !== null && node.num_forks > 0 && <circle class="fork-mark" cx={left + WIDE} cy={top + HIGH / 2} r="4.5" />}
                {node.end !== null && (
                  <>
                    <text class={cx("leaf-value", node.info["success"] ? "good" : (node.end === "failed" || (reward ?? 0) <= 0) && "bad")} x={left + WIDE + 8} y={top + 15}>
                      {node.end === "failed" ? "failed" : num(reward, 2)}
                      {node.end === "truncated" ? " cut" : ""}
                    </text>
                    <text class="leaf-name" x={left + WIDE + 58} y={top + 15}>
                      {node.branch}
                    </text>
                  </>
                )}
              </g>
            </a>
          );
        })}
      </svg>
    </div>
  );
}
