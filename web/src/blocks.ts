// The heat map's cells, asked for as they come into sight: blocks of rows, for one span of steps and one statistic. While a
// new span is on its way the old one is shown, so that zooming never flickers.

import { binOf } from "./bins.ts";
import type { Columns, Numbers } from "./columns.ts";
import type { Line } from "./paint.ts";
import { type Kind, type Scale, scale } from "./scales.ts";
import { aborted, type Params, type Source } from "./source.ts";

const SIZE = 256;
const KEPT = 48; // blocks; about 50 MB of cells at the widest

interface Block {
  first: number;
  edges: Numbers;
  value: Numbers;
  bad: Numbers | null;
  low: Numbers | null;
  high: Numbers | null;
  row: Numbers;
}

export interface Cell {
  site: number;
  value: number;
  low: number;
  high: number;
  bad: number;
  from: number;
  to: number;
}

export class Blocks {
  total = 0;
  scale: Scale = scale("linear", null);
  unit = "";
  failed: unknown = null;
  private kind: [Kind, [number, number] | null] = ["linear", null];
  private readonly kept = new Map<string, Block>(); // by key and block number, the latest last
  private asking = new Map<string, AbortController>();
  private key = "";
  private before = "";
  private params: Params = {};

  constructor(
    private readonly source: Source,
    private readonly changed: () => void,
  ) {}

  /** What to show. `same` tells whether the rows are the same as before, so that old cells may stand in for new ones. */
  show(params: Params, version: string, same: boolean): void {
    const key = `${JSON.stringify(params)} ${version}`;
    if (key === this.key) return;
    this.before = same ? this.shown() : "";
    this.key = key;
    this.params = params;
    this.failed = null;
    for (const [name, asked] of this.asking) if (!name.startsWith(key)) asked.abort();
    void this.want(0, 1);
  }

  /** Ask for the rows from `first` up to `last`, unless they are here or on their way. */
  async want(first: number, last: number): Promise<void> {
    const blocks = [];
    for (let n = Math.floor(first / SIZE); n * SIZE < Math.max(last, 1); n++) blocks.push(this.ask(n));
    await Promise.all(blocks);
  }

  line(row: number): Line | null {
    const block = this.blockOf(row);
    if (!block) return null;
    const bins = block.edges.length - 1;
    return { values: block.value, bad: block.bad, start: (row - block.first) * bins, edges: block.edges };
  }

  /** The index of the site that a row shows; -1 while it is not known. */
  site(row: number): number {
    const block = this.blockOf(row);
    return block ? (block.row[row - block.first] ?? -1) : -1;
  }

  cell(row: number, step: number): Cell | null {
    const block = this.blockOf(row);
    const bin = block ? binOf(block.edges, step) : -1;
    if (!block || bin < 0) return null;
    const at = (row - block.first) * (block.edges.length - 1) + bin;
    const pick = (values: Numbers | null) => (values ? values[at]! : NaN);
    const bounds = { from: block.edges[bin]!, to: block.edges[bin + 1]! };
    const values = { value: pick(block.value), low: pick(block.low), high: pick(block.high) };
    return { site: block.row[row - block.first]!, bad: block.bad ? block.bad[at]! : 0, ...values, ...bounds };
  }

  edges(row: number): Numbers | null {
    return this.blockOf(row)?.edges ?? null;
  }

  /** Whether anything of what is wanted has come. */
  get ready(): boolean {
    return this.kept.has(`${this.key} 0`);
  }

  /** The scale anew: its colours depend on the theme. */
  recolour(): void {
    this.scale = scale(...this.kind);
  }

  close(): void {
    for (const asked of this.asking.values()) asked.abort();
  }

  private shown(): string {
    return this.kept.has(`${this.key} 0`) ? this.key : this.before;
  }

  private blockOf(row: number): Block | null {
    const n = Math.floor(row / SIZE);
    const block = this.kept.get(`${this.key} ${n}`) ?? this.kept.get(`${this.before} ${n}`) ?? null;
    return block && row - block.first < block.row.length ? block : null;
  }

  private async ask(n: number): Promise<void> {
    const name = `${this.key} ${n}`;
    if (this.kept.has(name) || this.asking.has(name)) return;
    const stop = new AbortController();
    this.asking.set(name, stop);
    try {
      await this.load(n, name, stop.signal);
    } catch (error) {
      if (!aborted(error) && name.startsWith(this.key)) this.failed = error;
    } finally {
      this.asking.delete(name);
    }
    if (name.startsWith(this.key)) this.changed();
  }

  private async load(n: number, name: string, signal: AbortSignal): Promise<void> {
    const params = { ...this.params, rows: `${n * SIZE}:${(n + 1) * SIZE}` };
    this.keep(n, name, await this.source.columns("/api/heat", params, signal));
  }

  private keep(n: number, name: string, heat: Columns): void {
    this.kept.set(name, {
      first: n * SIZE,
      edges: heat.get("step"),
      value: heat.get("value"),
      bad: heat.find("bad"),
      low: heat.find("low"),
      high: heat.find("high"),
      row: heat.get("row"),
    });
    for (const old of this.kept.keys()) if (this.kept.size > KEPT && !old.startsWith(this.key)) this.kept.delete(old);
    if (!name.startsWith(this.key)) return;
    this.total = Number(heat.header["total"] ?? heat.get("row").length);
    this.unit = String(heat.header["unit"] ?? "");
    this.kind = [(heat.header["scale"] ?? "linear") as Kind, heat.header["range"] as [number, number] | null];
    this.recolour();
  }
}
