// Two runs held against each other: where they part, as a heat map of how far beyond the tolerance they are.

import { nearestBin } from "./bins.ts";
import { fill, h, select } from "./dom.ts";
import { facts } from "./findings.ts";
import { count, many, number } from "./format.ts";
import { Heatmap, type Model, type Point } from "./heatmap.ts";
import { legend } from "./legend.ts";
import { twoSided } from "./scales.ts";
import { empty, failed, loading } from "./states.ts";
import { type Rows, Table } from "./table.ts";
import type { DiffAnswer, RunInfo, Runs } from "./types.ts";
import { type Context, labelOf, type Span, type View } from "./view.ts";

export class DiffPage implements View {
  readonly element = h("div", { class: "page column diff" });
  private readonly tools = h("div", { class: "tools" });
  private readonly head = h("div");
  private readonly body = h("div", { class: "column", style: "flex: 1" });
  private readonly heat: Heatmap;
  private readonly table = new Table("sites that were compared", () => this.rows());
  private answer: DiffAnswer | null = null;
  private later = 0;
  private asked = "";
  private params: Record<string, string> = {};

  constructor(private readonly context: Context) {
    this.heat = new Heatmap({
      label: "Heat map: how far two runs are apart, by site and step",
      least: 14,
      read: (point) => this.read(point),
      open: (point) => this.open(point),
      view: (span) => this.zoomed(span),
    });
    fill(this.head, h("div", { class: "title" }, h("h1", {}, "Two runs compared")));
    fill(this.element, this.tools, this.head, this.body);
  }

  update(params: Record<string, string>): void {
    this.params = params;
    void this.load(params["a"] ?? this.context.run.id, params["b"] ?? "");
  }

  refresh(run: RunInfo): void {
    this.context.run = run;
  }

  repaint(): void {
    this.draw();
  }

  key(event: KeyboardEvent): boolean {
    return this.heat.key(event);
  }

  close(): void {
    clearTimeout(this.later);
    this.heat.close();
  }

  private async load(a: string, b: string): Promise<void> {
    if (this.asked === `${a} ${b}`) return this.look();
    this.asked = `${a} ${b}`;
    fill(this.body, loading(b ? "both runs" : "the runs"));
    try {
      const { runs } = await this.context.source.json<Runs>("/api/runs", {});
      this.choosers(
        runs.map((run) => run.id),
        a,
        b,
      );
      if (!b)
        return fill(
          this.body,
          empty(
            runs.length > 1 ? "Choose the run to compare with" : "There is only one run here",
            runs.length > 1 ? "" : "Open the folder that holds both: tensortap view runs/",
          ),
        );
      this.answer = await this.context.source.json<DiffAnswer>("/api/diff", { a, b });
      fill(this.body, this.heat.element, h("div", { class: "diff-key" }), this.table.element);
      this.draw();
    } catch (error) {
      fill(this.body, failed(error));
    }
  }

  private choosers(ids: string[], a: string, b: string): void {
    const { router } = this.context;
    fill(
      this.tools,
      h(
        "label",
        {},
        "a",
        select("First run", ids, a, (value) => router.set({ a: value }, true)),
      ),
      h(
        "label",
        {},
        "b",
        select(
          "Second run",
          [["", "choose"], ...ids.filter((id) => id !== a).map((id) => [id, id] as const)],
          b,
          (value) => router.set({ b: value }, true),
        ),
      ),
    );
  }

  private draw(): void {
    const { answer } = this;
    if (!answer?.heat) return;
    fill(this.head, this.headline(answer));
    const model = this.model(answer);
    this.heat.show(model);
    this.look();
    const key = this.body.querySelector(".diff-key");
    const title = "how far apart, in powers of ten of the tolerance: 0 is the tolerance itself";
    const save = this.heat.pngButton(`${answer.a} and ${answer.b}`);
    if (key) fill(key, h("div", { class: "key" }, legend(model.scale, title), save));
    this.table.refresh();
  }

  /** The steps that the address asks for. */
  private look(): void {
    const all = spanOf(this.answer?.heat.steps ?? []);
    const [from, to] = [Number(this.params["from"] ?? all.from), Number(this.params["to"] ?? all.to - 1) + 1];
    this.heat.look(from < to ? { from, to } : all);
  }

  private zoomed(span: Span): void {
    const all = spanOf(this.answer!.heat.steps);
    const patch = {
      from: span.from > all.from ? Math.floor(span.from) : null,
      to: span.to < all.to ? Math.ceil(span.to) - 1 : null,
    };
    clearTimeout(this.later);
    this.later = window.setTimeout(() => this.context.router.set(patch), 150);
  }

  private headline(answer: DiffAnswer): HTMLElement {
    const first = answer.first;
    const text = first
      ? `They part first in ${this.named(first.site)} at step ${count(first.step)}`
      : `Same within tolerance: ${many(answer.sites, "site")}, ${many(answer.steps.length, "step")}`;
    const said = (answer.headline ?? "").replace(/^differs first in .*?: /, "");
    const notes: [string, unknown][] = [
      ["sites that differ", `${count(answer.differing)} of ${count(answer.sites)}`],
      ["aligned by", answer.aligned_by],
      [
        "steps compared",
        (answer.every ?? 1) > 1
          ? `${count(answer.steps.length)}; a column is the worst of ${count(answer.every)}`
          : count(answer.steps.length),
      ],
    ];
    const remarks = (answer.remarks ?? []).map((remark) => h("li", {}, remark));
    return h(
      "div",
      { class: "diff-head" },
      h("div", { class: "title" }, h("h1", {}, text), first && said ? h("span", {}, said) : null),
      facts(notes),
      remarks.length ? h("ul", { class: "remarks", tabindex: 0 }, remarks) : null,
    );
  }

  private model({ heat, first }: DiffAnswer): Model {
    const all = spanOf(heat.steps);
    const edges = edgesOf(heat.steps);
    const values = heat.value.map((row) => Float32Array.from(row, (value) => value ?? NaN));
    const [low, high] = rangeOf(values);
    const row = first ? heat.sites.indexOf(first.site) : -1;
    return {
      rows: heat.sites.length,
      name: (i) => this.named(heat.sites[i] ?? ""),
      line: (i) => ({ values: values[i]!, bad: null, start: 0, edges }),
      scale: twoSided(low, high),
      all,
      spot: first && row >= 0 ? { row, step: first.step } : null,
    };
  }

  /** A site as people call it: the root by its class. */
  private named(site: string): string {
    return labelOf(site, this.context.run);
  }

  private read(point: Point): string[] {
    const heat = this.answer!.heat;
    const at = nearestBin(edgesOf(heat.steps), point.step);
    const value = heat.value[point.row]?.[at];
    const told =
      value === null || value === undefined
        ? "not in both"
        : value > 0
          ? `${number(10 ** value)} times the tolerance`
          : `within tolerance (${number(10 ** value)} of it)`;
    return [this.named(heat.sites[point.row] ?? ""), `step ${count(heat.steps[at])}: ${told}`];
  }

  private open(point: Point): void {
    const { heat } = this.answer!;
    const at = nearestBin(edgesOf(heat.steps), point.step);
    this.context.router.go("site", {
      run: this.params["a"] ?? this.context.run.id,
      site: heat.sites[point.row],
      step: heat.steps[at],
    });
  }

  private rows(): Rows {
    const rows = this.answer?.rows ?? [];
    const head = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    return { head, rows: rows.map((row) => head.map((name) => cell(row[name]))) };
  }
}

function cell(value: unknown): string | number | null {
  if (value === null || value === undefined) return null;
  return typeof value === "number" || typeof value === "string" ? value : JSON.stringify(value);
}

/** The least and the greatest that is there. */
function rangeOf(rows: Float32Array[]): [number, number] {
  let [low, high] = [0, 0];
  for (const row of rows)
    for (const value of row)
      if (Number.isFinite(value)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return low === 0 && high === 0 ? [-1, 0] : [low, high];
}

function spanOf(steps: number[]): Span {
  const first = steps[0] ?? 0;
  return { from: first, to: (steps[steps.length - 1] ?? first) + 1 };
}

/** A step reaches to the next one that was compared. */
function edgesOf(steps: number[]): Float64Array {
  return Float64Array.from([...steps, (steps[steps.length - 1] ?? 0) + 1]);
}
