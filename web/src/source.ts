// Where data comes from. The page knows only this interface: a server answers it, and so does what a report carries.

import { Columns } from "./columns.ts";
import type { Event } from "./types.ts";

export type Params = Record<string, string | number | undefined>;

export interface Source {
  /** Whether more can come while the page is open. */
  readonly live: boolean;
  json<T>(path: string, params: Params, signal?: AbortSignal): Promise<T>;
  columns(path: string, params: Params, signal?: AbortSignal): Promise<Columns>;
  /** Calls back whenever the run has changed; the function returned stops it. */
  events(run: string, changed: (event: Event) => void, lost: (lost: boolean) => void): () => void;
  /** Keep something beside the runs; only a server can. */
  post?<T>(path: string, body: unknown): Promise<T>;
}

/** What went wrong, and what to do about it. */
export class Failure extends Error {
  constructor(
    message: string,
    readonly hint = "",
    readonly status = 0,
  ) {
    super(message);
  }
}

/** Path and query with keys in order and without the empty ones: what a report's answers are filed under. */
export function address(path: string, params: Params): string {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== "");
  const query = given
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([key, value]) => `${key}=${encodeURIComponent(String(value))}`);
  return query.length ? `${path}?${query.join("&")}` : path;
}

export class Http implements Source {
  readonly live = true;

  async json<T>(path: string, params: Params, signal?: AbortSignal): Promise<T> {
    return (await this.ask(path, params, signal)).json() as Promise<T>;
  }

  async columns(path: string, params: Params, signal?: AbortSignal): Promise<Columns> {
    return Columns.decode(await (await this.ask(path, params, signal)).arrayBuffer());
  }

  events(run: string, changed: (event: Event) => void, lost: (lost: boolean) => void): () => void {
    const stream = new EventSource(address("api/events", { run }));
    stream.onmessage = (message) => changed(JSON.parse(message.data as string) as Event);
    stream.onopen = () => lost(false);
    stream.onerror = () => lost(true);
    return () => stream.close();
  }

  async post<T>(path: string, body: unknown): Promise<T> {
    const said = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const answer = await fetch(path.slice(1), said).catch(unreachable);
    if (!answer.ok) throw await refused(answer);
    return answer.json() as Promise<T>;
  }

  private async ask(path: string, params: Params, signal?: AbortSignal): Promise<Response> {
    const answer = await fetch(address(path.slice(1), params), signal ? { signal } : {}).catch(unreachable);
    if (!answer.ok) throw await refused(answer);
    return answer;
  }
}

function unreachable(error: unknown): never {
  if (error instanceof DOMException && error.name === "AbortError") throw error;
  throw new Failure("The server does not answer.", "Start it again with: tensortap view RUN");
}

async function refused(answer: Response): Promise<Failure> {
  const told = (await answer.json().catch(() => ({}))) as { error?: string; hint?: string };
  return new Failure(told.error ?? `The server answered ${answer.status}.`, told.hint ?? "", answer.status);
}

export function aborted(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}
