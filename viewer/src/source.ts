// Sources of answers: the server, or one file with all answers.

export type Query = Record<string, string>;

const kind = document.body.dataset["source"] ?? "server";
const known = new Map<string, Promise<unknown>>();
const LIMIT = 400; // maximum number of cached answers

export const isLive = kind === "server";

export class Missing extends Error {}

/** An answer in which characters that reorder or hide text are shown by their code. */
async function read(reply: Response): Promise<unknown> {
  const hidden = /\p{Bidi_Control}|[\u{200B}\u{2060}-\u{2064}\u{E0000}-\u{E007F}]/gu;
  const code = (one: string) => `[U+${one.codePointAt(0)!.toString(16).toUpperCase().padStart(4, "0")}]`;
  return JSON.parse((await reply.text()).replace(hidden, code));
}

async function fromServer(path: string, query: Query): Promise<unknown> {
  const text = new URLSearchParams(query).toString();
  const reply = await fetch(`api/${path}${text && `?${text}`}`);
  if (reply.status === 401) throw new Error("The server was restarted: open the address that it printed.");
  const body = (await read(reply)) as { error?: { message: string } };
  if (!reply.ok) throw new Missing(body.error?.message ?? reply.statusText);
  return body;
}

async function fromFile(path: string): Promise<unknown> {
  const element = document.querySelector(`script[data-path="${CSS.escape(path)}"]`);
  if (element === null) throw new Missing("Not in this export: agentenv view RUN shows everything.");
  const bytes = Uint8Array.from(atob((element.textContent ?? "").trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return read(new Response(stream));
}

/** An answer. Immutable answers are cached. */
export function ask<T>(path: string, query: Query = {}, fresh = false): Promise<T> {
  const key = `${path}?${new URLSearchParams(query)}`;
  const old = fresh ? undefined : known.get(key);
  if (old !== undefined) return old as Promise<T>;
  const found = isLive ? fromServer(path, query) : fromFile(path);
  known.set(key, found);
  found.catch(() => known.delete(key));
  if (known.size > LIMIT) known.delete(known.keys().next().value as string);
  return found as Promise<T>;
}

/** Drop cached answers. */
export function forget(prefix: string): void {
  for (const key of known.keys()) if (key.startsWith(prefix)) known.delete(key);
}
