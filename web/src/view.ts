// What a page of the viewer is made with, and what it must be able to do.

import type { Router } from "./router.ts";
import type { Source } from "./source.ts";
import type { RunInfo, RunSummary } from "./types.ts";

export interface Context {
  source: Source;
  router: Router;
  run: RunInfo;
  runs?: RunSummary[]; // all that are in the folder
}

export interface View {
  readonly element: HTMLElement;
  /** The address changed, within this page. */
  update(params: Record<string, string>): void;
  /** The run has grown. */
  refresh(run: RunInfo): void;
  /** A key nobody else wanted; true when it was used. */
  key?(event: KeyboardEvent): boolean;
  /** The colours changed. */
  repaint?(): void;
  close(): void;
}

/** A site as it is shown: the root has no path, and is called by its class. */
export function labelOf(site: string, run: RunInfo): string {
  return site.startsWith(":") && run.model ? run.model + site : site;
}

/** The phase to ask for, where a run has several: evaluation never stands between the steps of training. */
export function phaseOf(run: RunInfo): string | undefined {
  return run.phases.length > 1 ? run.phase || "all" : undefined;
}

/** Steps from `from` up to, and without, `to`. */
export interface Span {
  from: number;
  to: number;
}

export function whole(run: RunInfo): Span {
  const first = run.steps.first ?? 0;
  return { from: first, to: Math.max((run.steps.last ?? first) + 1, first + 1) };
}

/** The span an address asks for (its `to` is the last step), within what there is. */
export function spanOf(params: Record<string, string>, run: RunInfo): Span {
  const all = whole(run);
  const from = Math.max(all.from, Number(params["from"] ?? all.from) || 0);
  const to = Math.min(all.to, Number(params["to"] ?? all.to - 1) + 1 || all.to);
  return to > from ? { from, to } : all;
}

/** A span for an address: nothing where it is all there is. */
export function spanPatch(span: Span, run: RunInfo): { from: number | null; to: number | null } {
  const all = whole(run);
  const from = Math.max(all.from, Math.floor(span.from));
  const last = Math.min(all.to, Math.ceil(span.to)) - 1;
  return { from: from <= all.from ? null : from, to: last >= all.to - 1 ? null : last };
}

/** The narrowest span is one step, and none leaves the run. */
export function within(span: Span, all: Span): Span {
  const size = Math.min(Math.max(span.to - span.from, 1), all.to - all.from);
  const from = Math.min(Math.max(span.from, all.from), all.to - size);
  return { from, to: from + size };
}

/** Whole steps between two places that a brush went over, at least one. */
export function stepsOf(from: number, to: number): Span {
  const first = Math.round(from) < Math.round(to) ? Math.round(from) : Math.floor(from);
  return { from: first, to: Math.max(first + 1, Math.round(to)) };
}

/** Closer or farther about a step. */
export function zoomed(span: Span, about: number, factor: number, all: Span): Span {
  const from = about - (about - span.from) * factor;
  return within({ from, to: from + (span.to - span.from) * factor }, all);
}
