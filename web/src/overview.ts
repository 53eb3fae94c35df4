// The first page: layers in order of execution × steps as one heat map, the metrics above it, the findings beside it.

import { Aside } from "./aside.ts";
import { axisMode } from "./axes.ts";
import { Blocks } from "./blocks.ts";
import { fill, framed, h, sized } from "./dom.ts";
import { Found, headline } from "./findings.ts";
import { Heatmap, type Point } from "./heatmap.ts";
import { legend } from "./legend.ts";
import { Metrics } from "./metrics.ts";
import { otherRuns } from "./overlay.ts";
import { asked } from "./pattern.ts";
import { RankStrip } from "./ranks.ts";
import { said, table } from "./reading.ts";
import { clamp } from "./scales.ts";
import { empty, failed, nothingYet } from "./states.ts";
import { beside, nameOf } from "./stats.ts";
import { Table } from "./table.ts";
import { Timeline } from "./timeline.ts";
import { Tools } from "./tools.ts";
import { joined, listed, type Shape, Tree } from "./tree.ts";
import type { FindingGroup, RunInfo } from "./types.ts";
import { type Context, labelOf, phaseOf, type Span, spanOf, spanPatch, type View, whole, within } from "./view.ts";

const ROW = 15; // pixels that a name needs
const WIDTHS = 64; // pixels: a scroll bar more or less asks for nothing anew
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
  private readonly timeline: Timeline;
  private readonly ranks: RankStrip;
  private readonly says = h("div");
  private tree = new Tree([]);
  private treeKey = "";
  private longest = 0; // letters of the longest name
  private shape: Shape = { level: Infinity, open: new Set(), shut: new Set() };
  private asked = false; // whether the rules were asked
  private fitting = Infinity;
  private readonly tools: Tools;
  private readonly table = new Table(
    "the statistic by site and step",
    () => table(this.blocks, this.context.run, this.heat.span, (row) => this.labelAt(row, true)),
    () => table(this.blocks, this.context.run, this.heat.span, (row) => this.labelAt(row, true), Infinity),
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
      toggle: (row) => this.toggle(row),
      least: ROW,
      view: (span) => this.look(span),
      rows: (first, last) => void this.blocks.want(first, last),
      gutter: (width) => this.gutter(width),
      hover: (point) => {
        this.metrics.point(point ? point.step : NaN);
        this.timeline.point(point ? point.step : NaN);
      },
      cursor: (point) => this.address({ step: Math.floor(point.step), site: this.nameAt(point.row) }),
    });
    this.metrics = new Metrics(context.source, {
      hover: (step) => this.heat.point(step),
      zoom: (span) => this.look(span ?? whole(this.context.run)),
      choose: (names) => context.router.set({ metrics: names.join(",") || "none" }),
    });
    this.found = new Found(context, (error) => this.told(error));
    this.aside = new Aside(context, (group) => this.highlight(group));
    this.timeline = new Timeline(context.source, this.redraw);
    this.ranks = new RankStrip(context.source, (rank) => context.router.set({ rank }));
    this.tools = new Tools(context, (patch) => context.router.set(patch));
    this.unsize = sized(this.ground, () => this.resized());
    fill(this.element, this.ground, this.aside.element);
    if (!context.run.steps.count) void this.found.load();
  }

  update(params: Record<string, string>): void {
    this.params = params;
    if (!this.context.run.steps.count) return fill(this.ground, nothingYet(this.context.run));
    if (!this.heat.element.isConnected)
      fill(
        this.ground,
        this.says,
        this.tools.element,
        this.metrics.element,
        this.timeline.element,
        this.ranks.element,
        this.heat.element,
        this.key_,
        this.table.element,
        this.timeline.table.element,
        this.context.run.metrics.length ? this.metrics.table.element : null,
      );
    const chips = this.metrics.chips(this.context.run.metrics, params["metrics"]);
    this.heat.look(spanOf(params, this.context.run));
    this.grow();
    this.heat.measure(); // the first request is for the width that is shown
    this.tools.draw(
      params,
      this.stat,
      this.port || "all",
      chips,
      spanPatch(this.heat.span, this.context.run),
      () => this.look(whole(this.context.run)),
      { deepest: this.tree.deepest, fitting: this.fitting },
    );
    this.metrics.style(axisMode(params["y"]), Number(params["smooth"] ?? 0), this.context.run.id);
    this.metrics.look(this.heat.span);
    this.ask();
    this.draw();
    this.metrics.draw();
  }

  refresh(run: RunInfo): void {
    this.context.run = run;
    this.aside.refresh(run);
    if (this.asked) void this.found.load();
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
    this.timeline.draw();
    this.ranks.draw();
    this.redraw();
  }

  close(): void {
    clearTimeout(this.later);
    this.unsize();
    this.heat.close();
    this.blocks.close();
    this.metrics.close();
    this.found.close();
    this.timeline.close();
    this.ranks.close();
  }

  /** The tree of the rows, made anew when they are others, and what of it is open: a filter shows every site. */
  private grow(): void {
    const { run } = this.context;
    const key = `${run.sites.length} ${this.port} ${this.stat}`;
    if (key !== this.treeKey) this.plant(key);
    const { level, open, shut, sites } = this.params;
    const chosen = level === "all" || (sites && !level) ? Infinity : Number(level) || this.fitting;
    this.shape = { level: chosen, open: listed(open), shut: listed(shut) };
  }

  private plant(key: string): void {
    const { run } = this.context;
    const { port } = this;
    const sites = run.sites.filter((site) => !port || site.port === port);
    this.treeKey = key;
    this.tree = new Tree(sites);
    this.longest = sites.reduce((most, site) => Math.max(most, labelOf(site.site, run).length), 0);
    this.fitting = this.tree.fitting(Math.max(12, Math.floor(Math.max(innerHeight * 0.55, 260) / ROW)));
  }

  private toggle(row: number): void {
    const branch = this.branch(row);
    if (!branch) return;
    const { open, shut } = this.shape;
    const change = (set: ReadonlySet<string>, add: boolean) => {
      const next = new Set(set);
      if (add) next.add(branch.module);
      else next.delete(branch.module);
      return joined(next) || null;
    };
    this.context.router.set({ open: change(open, branch.folded), shut: change(shut, !branch.folded) });
  }

  private branch(row: number) {
    const site = this.context.run.sites[this.blocks.site(row)];
    return site ? this.tree.branch(site.path, this.shape) : null;
  }

  /** A row's name: a collapsed module with the number of its sites, or a site; of outputs the port says nothing. */
  private labelAt(row: number, whole = false): string {
    const branch = this.branch(row);
    if (branch?.folded) return `${branch.module} (${branch.count})`;
    const label = labelOf(this.nameAt(row), this.context.run);
    return this.port === "output" && !whole ? label.replace(/:output$/, "") : label;
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
    const least = width < 620 ? 116 : 180;
    return Math.round(clamp(this.longest * 6.6 + 40, least, Math.max(least, Math.min(380, width * 0.3))));
  }

  private ask(): void {
    const { run } = this.context;
    const folds = this.tree.folds(this.shape);
    const rows = {
      run: run.id,
      phase: phaseOf(run),
      port: this.port,
      sites: asked(this.params["sites"] ?? "", run.sites),
      rank: this.params["rank"],
      fold: folds.length ? JSON.stringify(folds) : undefined,
    };
    const width = clamp(Math.round(this.heat.width / WIDTHS) * WIDTHS, WIDTHS, 4096);
    const span = spanPatch(this.heat.span, run);
    const steps = { from: span.from ?? undefined, to: span.to ?? undefined, width };
    const key = JSON.stringify([rows, this.stat]);
    this.blocks.show({ ...rows, ...steps, stat: this.stat }, String(run.version), key === this.rowsKey);
    this.rowsKey = key;
    const of = { run: run.id, phase: phaseOf(run) };
    const version = String(run.version);
    if (run.metrics.length)
      void this.metrics.load({ ...of, rank: this.params["rank"], ...steps }, version, otherRuns(this.params));
    void this.timeline.load(run);
    void this.ranks.load({ ...of, stat: this.stat, port: this.port, ...steps }, version, run.ranks.length > 1);
  }

  private draw(): void {
    const { blocks } = this;
    this.tools.wrong(blocks.failed, asked(this.params["sites"] ?? "", this.context.run.sites));
    const model = {
      rows: blocks.failed ? 0 : blocks.total,
      name: (row: number) => this.labelAt(row),
      line: (row: number) => blocks.line(row),
    };
    this.heat.show({
      ...model,
      mark: (row) => this.colour(row),
      ...(this.tree.deepest > 0 ? { branch: (row: number) => this.branch(row) } : {}),
      scale: blocks.scale,
      all: whole(this.context.run),
    });
    this.metrics.align(this.heat.gutter);
    this.timeline.look(this.heat.span, this.heat.gutter);
    this.ranks.look(this.heat.span, this.heat.gutter);
    const nothing =
      blocks.ready &&
      !blocks.total &&
      empty("No site matches", "Clear the filter, or choose another port or statistic.");
    if (blocks.failed && !this.params["sites"]) return fill(this.key_, failed(blocks.failed));
    const spread = this.params["rank"] === "spread" ? ", spread over ranks relative to their middle" : "";
    const title = `${nameOf(this.stat)}${spread}`;
    const save = this.heat.pngButton(`${this.context.run.id} ${title}`);
    if (blocks.ready && !this.asked) {
      this.asked = true; // the rules take the server's time: they follow the first picture
      void this.found.load();
    }
    fill(this.key_, nothing || h("div", { class: "key" }, legend(blocks.scale, title), save));
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

  private colour(row: number): string {
    const branch = this.branch(row);
    if (!branch?.folded) return this.found.colour(this.nameAt(row));
    return this.found.colourBelow(branch.module, this.port);
  }

  private look(span: Span): void {
    this.heat.look(within(span, whole(this.context.run)));
    this.metrics.look(this.heat.span);
    this.timeline.look(this.heat.span, this.heat.gutter);
    this.ranks.look(this.heat.span, this.heat.gutter);
    this.address({ ...spanPatch(this.heat.span, this.context.run) });
  }

  private address(patch: Record<string, string | number | null>): void {
    clearTimeout(this.later);
    this.later = window.setTimeout(() => this.context.router.set(patch), WAIT);
  }

  private open(point: Point): void {
    if (this.branch(point.row)?.folded) return this.toggle(point.row);
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

  private highlight(group: FindingGroup | null): void {
    if (!group?.site) return;
    for (let row = 0; row < this.blocks.total; row++) {
      const branch = this.branch(row);
      const inside = branch?.folded && group.site.startsWith(branch.module);
      if (inside || this.nameAt(row) === group.site)
        return this.heat.select({ row, step: group.steps?.first ?? this.heat.span.from });
    }
  }

  private told(error?: unknown): void {
    if (error) this.aside.failed(error);
    else if (this.found.answer) {
      this.aside.found(this.found.answer);
      fill(this.says, headline(this.found.answer));
    }
    this.redraw();
  }

  private resized(): void {
    this.metrics.resize();
    this.metrics.align(this.heat.gutter);
    this.timeline.look(this.heat.span, this.heat.gutter);
    this.ranks.look(this.heat.span, this.heat.gutter);
    if (this.context.run.steps.count) this.ask();
  }
}
