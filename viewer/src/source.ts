// Where answers come from: the server, one file that holds them all, or a folder of files.

export type Query = Record<string, string>;

const kind = document.body.dataset["source"] ?? "server";
const known = new Map<string, Promise<unknown>>();
const LIMIT = 400; // answers that are remembered

export const isLive = kind === "server";

export class Missing extends Error {}

async function fromServer(path: string, query: Query): Promise<unknown> {
  const text = new URLSearchParams(query).toString();
  const reply = await fetch(`api/${path}${text && `?${text}`}`);
  if (reply.status === 403) throw new Error("The server has started anew: open the address that it has printed.");
  const body = (await reply.json()) as { error?: string };
  if (!reply.ok) throw new Missing(body.error ?? reply.statusText);
  return body;
}

async function fromFolder(path: string): Promise<unknown> {
  const reply = await fetch(`data/${path}.json`);
  if (!reply.ok) throw new Missing("This was not exported: agentenv view RUN shows all of it.");
  return reply.json();
}

async function fromFile(path: string): Promise<unknown> {
  const element = document.querySelector(`script[data-path="${CSS.escape(path)}"]`);
  if (element === null) throw new Missing("This was not exported: agentenv view RUN shows all of it.");
  const bytes = Uint8Array.from(atob((element.textContent ?? "").trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** An answer. What does not change while somebody looks is remembered. */
export function ask<T>(path: string, query: Query = {}, fresh = false): Promise<T> {
  const key = `${path}?${new URLSearchParams(query)}`;
  const old = fresh ? undefined : known.get(key);
  if (old !== undefined) return old as Promise<T>;
  const found = kind === "server" ? fromServer(path, query) : kind === "folder" ? fromFolder(path) : fromFile(path);
  known.set(key, found);
  found.catch(() => known.delete(key));
  if (known.size > LIMIT) known.delete(known.keys().next().value as string);
  return found as Promise<T>;
}

/** Forget answers, so that they are asked again. */
export function forget(prefix: string): void {
  for (const key of known.keys()) if (key.startsWith(prefix)) known.delete(key);
}
