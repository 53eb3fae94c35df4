// What a report carries, behind the same interface as a server. A zoom crops what is there; a filter picks rows of it.

import { Columns, type Column, type Numbers } from "./columns.ts";
import { matcher } from "./pattern.ts";
import { Failure, type Params, type Source } from "./source.ts";
import { modulesOf } from "./tree.ts";
import type { RunInfo } from "./types.ts";

interface Entry {
  type: "json" | "columns";
  data: string;
}

interface Filed {
  path: string;
  params: URLSearchParams;
  entry: Entry;
}

const SAMPLED = 100_000;
// A report holds each answer once, for the whole run; these only say which part of it is wanted.
const CROPS = new Set(["from", "to", "width", "rows", "sites", "port", "run", "phase", "fold"]);

export class Embedded implements Source {
  readonly live = false;
  private readonly filed: Filed[];
  private readonly opened = new Map<Entry, Promise<ArrayBuffer>>();

  constructor(entries: Record<string, Entry>) {
    this.filed = Object.entries(entries).map(([key, entry]) => {
      const [path = "", query = ""] = key.split(/\?(.*)/s);
      return { path, params: new URLSearchParams(query), entry };
    });
  }

  /** What the page carries, if it is a report. */
  static here(): Embedded | null {
    const text = document.getElementById("tensortap-report")?.textContent;
    return text ? new Embedded(JSON.parse(text) as Record<string, Entry>) : null;
  }

  async json<T>(path: string, params: Params): Promise<T> {
    return JSON.parse(new TextDecoder().decode(await this.bytes(path, params))) as T;
  }

  async columns(path: string, params: Params): Promise<Columns> {
    const whole = Columns.decode(await this.bytes(path, params));
    return path === "/api/heat" ? picked(whole, params, await this.json<RunInfo>("/api/run", {})) : whole;
  }

  events(): () => void {
    return () => undefined;
  }

  private async bytes(path: string, params: Params): Promise<ArrayBuffer> {
    const found = this.filed.find((filed) => filed.path === path && agrees(filed.params, params));
    if (!found) throw new Failure("The report does not carry this.", "Open the run itself: tensortap view RUN");
    let bytes = this.opened.get(found.entry);
    if (!bytes) this.opened.set(found.entry, (bytes = unpacked(found.entry.data)));
    return bytes;
  }
}

function agrees(filed: URLSearchParams, wanted: Params): boolean {
  const names = new Set([...filed.keys(), ...Object.keys(wanted)].filter((name) => !CROPS.has(name)));
  return [...names].every((name) => (filed.get(name) ?? "") === String(wanted[name] ?? ""));
}

async function unpacked(base64: string): Promise<ArrayBuffer> {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** The rows of a heat map that a server would have sent for these sites, this port and this slice. */
function picked(heat: Columns, params: Params, run: RunInfo): Columns {
  const sites = new Map(run.sites.map((site) => [site.i, site]));
  const finds = params["sites"] ? matcher(String(params["sites"])) : () => true;
  const all = [...heat.get("row")].map((row, at) => ({ at, site: sites.get(row) }));
  const kept = all.filter(({ site }) => site && (!params["port"] || site.port === params["port"]) && finds(site));
  const [first, last] = String(params["rows"] ?? "")
    .split(":")
    .map(Number);
  const groups = grouped(kept.map(({ at, site }) => ({ at, path: site!.path })), String(params["fold"] ?? ""));
  const chosen = params["rows"] ? groups.slice(first, last) : groups;
  const columns = ["value", "low", "high", "bad", "row"].filter((name) => heat.has(name));
  const cut = heat.with(
    Object.fromEntries(columns.map((name) => [name, merged(heat.column(name), chosen, name)])),
    { total: groups.length },
  );
  const rows = taken(
    heat.column("value"),
    kept.map((row) => row.at),
  ).values;
  return cut.with({}, { range: rangeOf(rows, heat.header["scale"] === "log") });
}

/** Rows of collapsed modules together, as the server does it. */
function grouped(rows: { at: number; path: string }[], fold: string): number[][] {
  const folded = new Set(fold ? (JSON.parse(fold) as string[]) : []);
  const groups = new Map<string | number, number[]>();
  for (const { at, path } of rows) {
    const key = modulesOf(path).find((module) => folded.has(module)) ?? at;
    groups.set(key, [...(groups.get(key) ?? []), at]);
  }
  return [...groups.values()];
}

function merged(column: Column, groups: number[][], name: string): Column {
  const out = taken(column, groups.map((group) => group[0]!));
  const wide = column.shape[1] ?? 1;
  if (name === "row") return out;
  groups.forEach((group, i) => {
    if (group.length < 2) return;
    for (let x = 0; x < wide; x++) {
      const values = group.map((row) => column.values[row * wide + x]!).filter((value) => !Number.isNaN(value));
      const finite = values.filter(Number.isFinite);
      const mean = finite.reduce((sum, value) => sum + value, 0) / finite.length;
      const folds: Record<string, number> = { low: Math.min(...finite), high: Math.max(...finite), bad: Math.max(0, ...values) };
      const value = folds[name] ?? mean;
      out.values[i * wide + x] = finite.length ? value : values.length ? Infinity : NaN;
    }
  });
  return out;
}

/** Where the colours begin and end, as the server says it: all but the outermost hundredths. */
function rangeOf(values: Numbers, log: boolean): [number, number] | null {
  const every = Math.max(1, Math.floor(values.length / SAMPLED));
  const chosen = Array.from({ length: Math.floor(values.length / every) }, (_, i) => values[i * every]!);
  const known = chosen.filter((value) => Number.isFinite(value) && (!log || value > 0)).sort((a, b) => a - b);
  return known.length ? [known[Math.floor(known.length * 0.01)]!, known[Math.ceil(known.length * 0.99) - 1]!] : null;
}

function taken({ values, shape }: Column, at: number[]): Column {
  const wide = shape[1] ?? 1;
  const out = new (values.constructor as new (length: number) => Numbers)(at.length * wide);
  at.forEach((row, i) => out.set(values.subarray(row * wide, (row + 1) * wide), i * wide));
  return { values: out, shape: [at.length, ...shape.slice(1)] };
}
