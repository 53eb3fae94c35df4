// The first page: layers in order of execution × steps as one heat map, the metrics above it, the findings beside it.

import { Aside } from "./aside.ts";
import { Blocks } from "./blocks.ts";
import { fill, framed, h, sized } from "./dom.ts";
import { Found } from "./findings.ts";
import { Heatmap, type Point } from "./heatmap.ts";
import { legend } from "./legend.ts";
import { Metrics } from "./metrics.ts";
import { asked } from "./pattern.ts";
import { said, table } from "./reading.ts";
import { clamp } from "./scales.ts";
import { empty, failed, nothingYet } from "./states.ts";
import { beside, nameOf } from "./stats.ts";
import { Table } from "./table.ts";
import { Tools } from "./tools.ts";
import type { Finding, RunInfo } from "./types.ts";
import { type Context, labelOf, phaseOf, type Span, spanOf, spanPatch, type View, whole, within } from "./view.ts";

const WAIT = 150; // milliseconds of quiet before the address, and the server, follow the mouse

export class Overview implements View {
  readonly element = h("div", { class: "page full" });
  private readonly ground = h("div", { class: "column" });
  private readonly key_ = h("div");
  private readonly heat: Heatmap;
  private readonly blocks: Blocks;
  private readonly metrics: Metrics;
  private readonly found: Found;
  private readonly aside: Aside;
  private readonly tools: Tools;
  private readonly table = new Table("the statistic by site and step", () =>
    table(this.blocks, this.context.run, this.heat.span),
  );
  private params: Record<string, string> = {};
  private rowsKey = "";
  private later = 0;
  private readonly unsize: () => void;
  private readonly redraw = framed(() => this.draw());

  constructor(private readonly context: Context) {
    this.blocks = new Blocks(context.source, this.redraw);
    this.heat = new Heatmap({
      label: "Heat map: sites in order of execution by steps. Arrows move the cell, Enter opens the site.",
      read: (point) => said(this.blocks, this.context.run, point, this.stat),
      open: (point) => this.open(point),
      view: (span) => this.look(span),
      rows: (first, last) => void this.blocks.want(first, last),
      gutter: (width) => this.gutter(width),
      hover: (point) => this.metrics.point(point ? point.step : NaN),
      cursor: (point) => this.address({ step: Math.floor(point.step), site: this.nameAt(point.row) }),
    });
    this.metrics = new Metrics(context.source, {
      hover: (step) => this.heat.point(step),
      zoom: (span) => this.look(span ?? whole(this.context.run)),
      choose: (names) => context.router.set({ metrics: names.join(",") || "none" }),
    });
    this.found = new Found(context, (error) => this.told(error));
    this.aside = new Aside(context, (finding) => this.highlight(finding));
    this.tools = new Tools(context, (patch) => context.router.set(patch));
    this.unsize = sized(this.ground, () => this.resized());
    fill(this.element, this.ground, this.aside.element);
    void this.found.load();
  }

  update(params: Record<string, string>): void {
    this.params = params;
    if (!this.context.run.steps.count) return fill(this.ground, nothingYet(this.context.run));
    if (!this.heat.element.isConnected)
      fill(
        this.ground,
        this.tools.element,
        this.metrics.element,
        this.heat.element,
        this.key_,
        this.table.element,
        this.context.run.metrics.length ? this.metrics.table.element : null,
      );
    const chips = this.metrics.chips(this.context.run.metrics, params["metrics"]);
    this.heat.look(spanOf(params, this.context.run));
    this.tools.draw(params, this.stat, this.port || "all", chips, spanPatch(this.heat.span, this.context.run), () =>
      this.look(whole(this.context.run)),
    );
    this.metrics.look(this.heat.span);
    this.ask();
    this.draw();
    this.metrics.draw();
  }

  refresh(run: RunInfo): void {
    this.context.run = run;
    this.aside.refresh(run);
    void this.found.load();
    this.update(this.params);
  }

  key(event: KeyboardEvent): boolean {
    if (event.key === "/") this.tools.focus();
    else if (event.key === "[" || event.key === "]")
      this.context.router.set({ stat: beside(this.tools.stats(), this.stat, event.key === "]" ? 1 : -1) });
    else return this.heat.key(event);
    return true;
  }

  repaint(): void {
    this.metrics.repaint();
    this.blocks.recolour();
    this.redraw();
  }

  close(): void {
    clearTimeout(this.later);
    this.unsize();
    this.heat.close();
    this.blocks.close();
    this.metrics.close();
    this.found.close();
  }

  private get stat(): string {
    return this.params["stat"] ?? this.tools.stats()[0] ?? "std";
  }

  /** Outputs unless another is asked for; statistics of gradients and updates choose their own. */
  private get port(): string {
    const named = this.params["port"];
    if (named !== undefined) return named === "all" ? "" : named;
    const outputs = this.context.run.sites.some((site) => site.port === "output");
    return outputs && this.stat !== "grad" && this.stat !== "update" ? "output" : "";
  }

  /** Room for the longest name, and for the metrics' values above; at most a third of the width. */
  private gutter(width: number): number {
    const names = this.context.run.sites.filter((site) => !this.port || site.port === this.port);
    const longest = Math.max(0, ...names.map((site) => labelOf(site.site, this.context.run).length));
    return Math.round(clamp(longest * 6.6 + 26, 180, Math.min(380, width * 0.3)));
  }

  private ask(): void {
    const { run } = this.context;
    const rows = { run: run.id, phase: phaseOf(run), port: this.port, sites: asked(this.params["sites"] ?? "", run.sites) };
    const width = Math.min(4096, Math.max(64, Math.round(this.heat.width)));
    const span = spanPatch(this.heat.span, run);
    const steps = { from: span.from ?? undefined, to: span.to ?? undefined, width };
    const key = JSON.stringify([rows, this.stat]);
    this.blocks.show({ ...rows, ...steps, stat: this.stat }, String(run.version), key === this.rowsKey);
    this.rowsKey = key;
    if (run.metrics.length) void this.metrics.load({ run: run.id, phase: phaseOf(run), ...steps }, String(run.version));
  }

  private draw(): void {
    const { blocks } = this;
    this.tools.wrong(blocks.failed, asked(this.params["sites"] ?? "", this.context.run.sites));
    const model = {
      rows: blocks.failed ? 0 : blocks.total,
      name: (row: number) => labelOf(this.nameAt(row), this.context.run),
      line: (row: number) => blocks.line(row),
    };
    this.heat.show({
      ...model,
      mark: (row) => this.found.colour(this.nameAt(row)),
      scale: blocks.scale,
      all: whole(this.context.run),
    });
    this.metrics.align(this.heat.gutter);
    const nothing =
      blocks.ready &&
      !blocks.total &&
      empty("No site matches", "Clear the filter, or choose another port or statistic.");
    if (blocks.failed && !this.params["sites"]) return fill(this.key_, failed(blocks.failed));
    fill(this.key_, nothing || legend(blocks.scale, nameOf(this.stat)));
    this.table.refresh();
    this.restore();
  }

  /** The cell that the address names, once its row is known. */
  private restore(): void {
    const site = this.params["site"];
    if (!site || this.heat.cursor) return;
    for (let row = 0; row < this.blocks.total; row++) {
      if (this.nameAt(row) === site)
        return this.heat.select({ row, step: Number(this.params["step"] ?? this.heat.span.from) });
    }
  }

  private look(span: Span): void {
    this.heat.look(within(span, whole(this.context.run)));
    this.metrics.look(this.heat.span);
    this.address({ ...spanPatch(this.heat.span, this.context.run) });
  }

  private address(patch: Record<string, string | number | null>): void {
    clearTimeout(this.later);
    this.later = window.setTimeout(() => this.context.router.set(patch), WAIT);
  }

  private open(point: Point): void {
    const site = this.nameAt(point.row);
    clearTimeout(this.later);
    this.context.router.set({ site, step: Math.floor(point.step) });
    if (site)
      this.context.router.go("site", {
        site,
        step: Math.floor(point.step),
        ...spanPatch(this.heat.span, this.context.run),
      });
  }

  private nameAt(row: number): string {
    const index = this.blocks.site(row);
    return index < 0 ? "" : (this.context.run.sites[index]?.site ?? "");
  }

  private highlight(finding: Finding | null): void {
    if (!finding?.site) return;
    for (let row = 0; row < this.blocks.total; row++) {
      if (this.nameAt(row) === finding.site)
        return this.heat.select({ row, step: finding.steps?.first ?? this.heat.span.from });
    }
  }

  private told(error?: unknown): void {
    if (error) this.aside.failed(error);
    else if (this.found.answer) this.aside.found(this.found.answer);
    this.redraw();
  }

  private resized(): void {
    this.metrics.resize();
    this.metrics.align(this.heat.gutter);
    if (this.context.run.steps.count) this.ask();
  }
}
