// The row of controls above the heat map: statistic, port, filter, span of steps, metrics.

import { fill, h, select } from "./dom.ts";
import { AXES, axisMode } from "./axes.ts";
import { count, shortened } from "./format.ts";
import { overlayMenu } from "./overlay.ts";
import type { Patch } from "./router.ts";
import { Failure } from "./source.ts";
import { nameOf } from "./stats.ts";
import type { RunInfo } from "./types.ts";
import type { Context } from "./view.ts";

const TYPED = 250; // milliseconds after the last letter

export class Tools {
  readonly element = h("div", { class: "tools", role: "toolbar", "aria-label": "What the heat map shows" });
  private readonly filter: HTMLInputElement;
  private readonly error = h("span", { class: "wrong", role: "alert", hidden: true });
  private later = 0;
  private known: { run: RunInfo; stats: string[] } | null = null;

  constructor(
    private readonly context: Context,
    private readonly set: (patch: Patch) => void,
  ) {
    this.filter = h("input", {
      type: "search",
      placeholder: "filter sites ( / )",
      title: "A word, or a pattern: blocks.*.mlp  type:*Norm  re:h\\.[0-3]\\..*  fc:{input,output}",
      "aria-label": "Filter sites by pattern",
      spellcheck: "false",
    });
    this.filter.addEventListener("input", () => {
      clearTimeout(this.later);
      this.later = window.setTimeout(() => this.set({ sites: this.filter.value.trim() }), TYPED);
    });
    this.filter.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" && event.key !== "Enter") return;
      event.stopPropagation();
      this.filter.blur();
    });
  }

  /** The statistics that mean something here; worked out once for a version of the run, since rows ask for them. */
  stats(): string[] {
    const { run } = this.context;
    if (this.known?.run !== run) this.known = { run, stats: statsOf(run) };
    return this.known.stats;
  }

  focus(): void {
    this.filter.focus();
    this.filter.select();
  }

  draw(
    params: Record<string, string>,
    stat: string,
    port: string,
    chips: HTMLElement,
    span: { from: number | null; to: number | null },
    all: () => void,
    levels: { deepest: number; fitting: number },
  ): void {
    const typing = document.activeElement === this.filter;
    if (!typing) this.filter.value = params["sites"] ?? "";
    const held = document.activeElement?.getAttribute("aria-label");
    fill(
      this.element,
      h(
        "label",
        {},
        "statistic",
        select(
          "Statistic",
          this.stats().map((name) => [name, nameOf(name)] as const),
          stat,
          (value) => this.set({ stat: value }),
        ),
      ),
      h(
        "label",
        {},
        "port",
        select("Port", ["all", ...this.ports()], port, (value) => this.set({ port: value })),
      ),
      this.ranks(params),
      this.levels(params, levels),
      this.filter,
      this.range(span),
      this.zoomed(span, all),
      h("span", { class: "tools-break" }),
      chips,
      this.context.run.metrics.length ? [axisChooser(params, this.set), smoothing(params, this.set)] : null,
      overlayMenu(this.context, params),
      this.error,
    );
    if (typing) this.filter.focus();
    else if (held) (this.element.querySelector(`[aria-label="${held}"]`) as HTMLElement | null)?.focus();
  }

  /** What is wrong with the filter, in the words that were typed. */
  wrong(error: unknown, asked: string): void {
    this.error.hidden = !error;
    const text = error instanceof Failure ? `${error.message} ${error.hint}` : String(error);
    const typed = this.filter.value.trim();
    const said = asked ? text.replace(/^.*(?= matches nothing)/, typed).replaceAll(asked, typed) : text;
    if (error) this.error.textContent = shortened(said, 400);
  }

  private ports(): string[] {
    const there = new Set(this.context.run.sites.map((site) => site.port));
    return this.context.run.ports.map((port) => port.name).filter((name) => there.has(name));
  }

  private ranks(params: Record<string, string>): HTMLElement | null {
    const { ranks } = this.context.run;
    if (ranks.length < 2 || !this.context.source.live) return null;
    const options = [["", "all"], ["spread", "spread"], ...ranks.map((rank) => [String(rank), String(rank)] as const)] as const;
    return h("label", {}, "rank", select("Rank", options, params["rank"] ?? "", (rank) => this.set({ rank })));
  }

  /** How deep the module tree is open. */
  private levels(params: Record<string, string>, { deepest, fitting }: { deepest: number; fitting: number }): HTMLElement | null {
    if (deepest < 1) return null;
    const name = (level: number) => (level > deepest ? "all sites" : level === 1 ? "1 level" : `${level} levels`);
    const levels = Array.from({ length: Math.min(deepest, 8) }, (_, i) => [String(i + 1), name(i + 1)] as const);
    const options = [["", `as fits: ${name(fitting)}`] as const, ...levels, ["all", "all sites"] as const];
    const change = (level: string) => this.set({ level, open: null, shut: null });
    return h("label", {}, "modules", select("Module tree", options, params["level"] ?? "", change));
  }

  /** The range of steps in sight, to be typed. */
  private range(span: { from: number | null; to: number | null }): HTMLElement {
    const { first, last } = this.context.run.steps;
    const box = (label: string, key: "from" | "to", value: number | null) => {
      const input = h("input", { type: "number", class: "step", min: first, max: last, value: span[key] ?? value, "aria-label": label });
      input.addEventListener("change", () => this.set({ [key]: input.value === String(value) ? null : input.value }));
      return input;
    };
    return h("span", { class: "range" }, "steps ", box("First step", "from", first), " – ", box("Last step", "to", last));
  }

  private zoomed(span: { from: number | null; to: number | null }, all: () => void): HTMLElement | null {
    if (span.from === null && span.to === null) return null;
    const { first, last } = this.context.run.steps;
    return h(
      "button",
      { type: "button", class: "small", onclick: all, title: "Show all steps" },
      `steps ${count(span.from ?? first)}–${count(span.to ?? last)} ✕`,
    );
  }
}

function statsOf(run: RunInfo): string[] {
  const ports = new Set(run.sites.map((site) => site.port));
  const gradients = run.ports.some((port) => port.gradient && ports.has(port.name));
  const absent = [...(gradients ? [] : ["grad"]), ...(ports.has("update") ? [] : ["update"])];
  return run.stats.filter((stat) => !absent.includes(stat));
}

/** The y axis of curves: by most of their values, by all, or symmetric-logarithmic. */
export function axisChooser(params: Record<string, string>, set: (patch: Patch) => void): HTMLElement {
  return h("label", {}, "y axis", select("Y axis", AXES, axisMode(params["y"]), (y) => set({ y: y === "robust" ? null : y })));
}

export function smoothing(params: Record<string, string>, set: (patch: Patch) => void): HTMLElement {
  const input = h("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: params["smooth"] ?? 0,
    "aria-label": "Smoothing",
    title: "An exponential mean of the curves; the curve itself stays faint behind it",
  });
  input.addEventListener("change", () => set({ smooth: Number(input.value) ? input.value : null }));
  return h("label", { class: "smooth" }, "smoothing", input);
}
