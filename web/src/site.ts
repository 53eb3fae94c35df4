// One site closely: its distribution and statistics over steps, its gradient beside it, what was kept of it, and why.

import { axisMode } from "./axes.ts";
import type { Columns } from "./columns.ts";
import { fill, h, select, sized } from "./dom.ts";
import { facts } from "./findings.ts";
import { count, shape, value } from "./format.ts";
import { ask, otherRuns, overlayMenu } from "./overlay.ts";
import { Panel } from "./panel.ts";
import { aborted } from "./source.ts";
import { empty, nothingYet } from "./states.ts";
import { TensorView } from "./tensor.ts";
import { axisChooser, smoothing } from "./tools.ts";
import type { KeptTensor, RunInfo, SiteInfo } from "./types.ts";
import { type Context, labelOf, phaseOf, type Span, spanOf, spanPatch, type View, whole, within } from "./view.ts";

const WIDTH = 600;

export class SitePage implements View {
  readonly element = h("div", { class: "page" });
  private readonly head = h("div");
  private readonly body = h("div", { class: "grid two" });
  private readonly below = h("div", { class: "grid two", style: "margin-top: 18px" });
  private panels: Panel[] = [];
  private tensors: TensorView | null = null;
  private params: Record<string, string> = {};
  private shown = "";
  private asked = new AbortController();
  private later = 0;
  private readonly unsize: () => void;

  constructor(private readonly context: Context) {
    fill(this.element, this.head, this.body, this.below);
    this.unsize = sized(this.body, () => this.panels.forEach((panel) => panel.resize()));
  }

  update(params: Record<string, string>): void {
    this.params = params;
    const { run } = this.context;
    if (!run.steps.count) return fill(this.element, nothingYet(run));
    if (!this.head.isConnected) fill(this.element, this.head, this.body, this.below);
    const site = this.site();
    if (!site) return this.unknown(params["site"] ?? "");
    const names = [site.site, ...this.opposite(site)];
    if (this.shown !== names.join(" ")) this.furnish(names);
    void this.load(names);
  }

  refresh(run: RunInfo): void {
    this.context.run = run;
    this.update(this.params);
  }

  key(event: KeyboardEvent): boolean {
    const by = { ArrowUp: -1, ArrowDown: 1, "[": -1, "]": 1 }[event.key];
    const site = this.site();
    if (by === undefined || !site) return event.key === "0" ? (this.zoom(null), true) : false;
    const same = this.context.run.sites.filter((other) => other.port === site.port);
    const next = same[same.indexOf(site) + by];
    if (next) this.context.router.set({ site: next.site, call: null, tensor: null, index: null }, true);
    return true;
  }

  repaint(): void {
    this.panels.forEach((panel) => panel.draw());
    this.tensors?.repaint();
  }

  close(): void {
    clearTimeout(this.later);
    this.asked.abort();
    this.unsize();
    this.panels.forEach((panel) => panel.close());
    this.tensors?.close();
  }

  private site(): SiteInfo | undefined {
    const { sites } = this.context.run;
    return this.params["site"] === undefined ? sites[0] : sites.find((site) => site.site === this.params["site"]);
  }

  private opposite(site: SiteInfo): string[] {
    const beside = (port: string) =>
      this.context.run.sites.find(
        (other) => other.path === site.path && other.op === site.op && other.port === port && other.slot === site.slot,
      );
    const found = (this.context.run.ports.find((port) => port.name === site.port)?.beside ?? []).map(beside).find(Boolean);
    return found ? [found.site] : [];
  }

  private unknown(name: string): void {
    this.shown = "";
    const all = h("a", { href: this.context.router.link("overview", {}) }, "See all sites");
    fill(this.head);
    fill(this.below);
    fill(this.body, empty(name ? `${name} is not in this run` : "This run has no sites", all));
  }

  private furnish(names: string[]): void {
    this.panels.forEach((panel) => panel.close());
    this.shown = names.join(" ");
    this.panels = names.map(
      (name) => new Panel({ title: labelOf(name, this.context.run), zoom: (span) => this.zoom(span), hover: (step, from) => this.hovered(step, from) }),
    );
    fill(
      this.body,
      this.panels.map((panel) => panel.element),
    );
    this.tensors?.close();
    this.tensors = new TensorView(this.context, names[0]!);
  }

  private async load(names: string[]): Promise<void> {
    this.asked.abort();
    const { signal } = (this.asked = new AbortController());
    const span = spanOf(this.params, this.context.run);
    await Promise.all(names.map((name, i) => this.fetch(name, i, span, signal)));
  }

  private async fetch(name: string, i: number, span: Span, signal: AbortSignal): Promise<void> {
    const { run, source } = this.context;
    const part = spanPatch(span, run);
    const chosen = { call: this.params["call"], rank: this.params["rank"] };
    try {
      const data = await source.columns(
        "/api/site",
        {
          run: run.id,
          phase: phaseOf(run),
          site: name,
          from: part.from ?? undefined,
          to: part.to ?? undefined,
          width: WIDTH,
          ...chosen,
        },
        signal,
      );
      if (signal.aborted) return;
      const panel = this.panels[i]!;
      panel.style(axisMode(this.params["y"]), Number(this.params["smooth"] ?? 0), run.id);
      panel.show(data, span);
      const asked = { site: name, from: part.from ?? undefined, to: part.to ?? undefined, width: WIDTH, ...chosen };
      void ask(source, otherRuns(this.params), "/api/site", asked, signal).then((others) => panel.overlay(others)).catch(() => undefined);
      if (this.params["step"]) this.panels[i]?.point(Number(this.params["step"]) + 0.5);
      if (i === 0) this.about(data);
    } catch (error) {
      if (!aborted(error)) this.panels[i]?.fail(error);
    }
  }

  private about(data: Columns): void {
    const site = this.site()!;
    const kind = [site.type, site.dtype, shape(site.shape)].filter(Boolean).join(" · ");
    fill(
      this.head,
      h("div", { class: "title" }, h("h1", {}, labelOf(site.site, this.context.run)), h("span", { class: "quiet" }, kind)),
      this.tools(data),
    );
    const kept = (data.header["tensors"] ?? []) as KeptTensor[];
    const record = (data.header["record"] ?? {}) as Record<string, unknown>;
    this.tensors!.show(kept, this.params["tensor"], this.params["index"]);
    fill(
      this.below,
      this.tensors!.element,
      h("section", { class: "panel" }, h("h2", {}, "Latest record"), facts(told(record))),
    );
  }

  private tools(data: Columns): HTMLElement {
    const { router, run } = this.context;
    const names = run.sites.map((site) => site.site);
    const calls = (data.header["calls"] ?? []) as number[];
    const ranks = (data.header["ranks"] ?? []) as number[];
    const siblings = (data.header["siblings"] ?? []) as string[];
    const pick = (label: string, key: string, values: number[]) =>
      values.length > 1
        ? h(
            "label",
            {},
            label,
            select(
              label,
              [["", label === "rank" ? "all, with their spread" : "all"], ...values.map((n) => [String(n), count(n)] as const)],
              this.params[key] === "spread" ? "" : (this.params[key] ?? ""),
              (to) => router.set({ [key]: to }),
            ),
          )
        : null;
    const zoomed =
      this.params["from"] || this.params["to"]
        ? h(
            "button",
            { type: "button", class: "small", onclick: () => this.zoom(null) },
            `steps ${this.params["from"] ?? ""}–${this.params["to"] ?? ""} ✕`,
          )
        : null;
    const links = siblings
      .slice(0, 12)
      .map((name) =>
        h(
          "a",
          { href: router.link("site", { site: name, from: this.params["from"], to: this.params["to"] }), title: name },
          near(name, this.site()!.path),
        ),
      );
    const chooser = h("input", {
      list: "sites",
      value: this.site()!.site,
      "aria-label": "Site",
      spellcheck: "false",
      class: "site",
    });
    chooser.addEventListener("change", () =>
      router.set({ site: chooser.value, call: null, tensor: null, index: null }, true),
    );
    const list = h(
      "datalist",
      { id: "sites" },
      names.slice(0, 5000).map((name) => h("option", { value: name })),
    );
    return h(
      "div",
      { class: "tools" },
      chooser,
      list,
      pick("call", "call", calls),
      pick("rank", "rank", ranks),
      axisChooser(this.params, (patch) => router.set(patch)),
      smoothing(this.params, (patch) => router.set(patch)),
      overlayMenu(this.context, this.params),
      zoomed,
      links.length ? h("span", { class: "quiet" }, "beside it:") : null,
      links,
    );
  }

  private zoom(span: Span | null): void {
    const { run, router } = this.context;
    const patch = spanPatch(span ? within(span, whole(run)) : whole(run), run);
    clearTimeout(this.later);
    this.later = window.setTimeout(() => router.set(patch), 80);
  }

  private hovered(step: number, from: Panel): void {
    this.panels.filter((panel) => panel !== from).forEach((panel) => panel.point(step));
  }
}

/** A neighbour's name without the path they share. */
function near(name: string, path: string): string {
  return name.startsWith(path) ? name.slice(path.length).replace(/^[.:]/, "") : name;
}

/** A record's fields, those that say something. */
function told(record: Record<string, unknown>): [string, unknown][] {
  const pairs = Object.entries(record).filter(
    ([, thing]) => thing !== null && thing !== "" && thing !== undefined && value(thing) !== "{}",
  );
  const names: Record<string, string> = { reason: "kept because", numbers: "numbers" };
  return pairs.map(([name, thing]) => [
    names[name] ?? name,
    thing && typeof thing === "object" && !Array.isArray(thing) ? JSON.stringify(thing) : thing,
  ]);
}
