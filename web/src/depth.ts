// One step through the network: how large activations and gradients are, by depth, with a slider over steps.

import { Chart, type Series } from "./chart.ts";
import { token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { fill, h, sized } from "./dom.ts";
import { count, shortened } from "./format.ts";
import { ask, otherRuns, type Other, overlayMenu } from "./overlay.ts";
import { empty, failed, loading, nothingYet } from "./states.ts";
import { type Rows, Table } from "./table.ts";
import type { RunInfo } from "./types.ts";
import { type Context, labelOf, phaseOf, type View } from "./view.ts";

const WIDTH = 600; // steps a slider can tell apart
const PACE = 90; // milliseconds a step when played

type Half = "forward" | "backward";
const HALVES: readonly [Half, string][] = [
  ["forward", "activations"],
  ["backward", "gradients"],
];

export class Depth implements View {
  readonly element = h("div", { class: "page" }, loading("the depth profile"));
  private readonly charts: Record<Half, Chart>;
  private readonly slider = h("input", { type: "range", min: 0, max: 0, value: 0, step: 1, "aria-label": "Step" });
  private readonly told = h("output");
  private readonly play = h("button", { type: "button", "aria-label": "Play or pause" }, "▶ Play");
  private readonly table = new Table("scale by depth", () => this.rows());
  private data: Columns | null = null;
  private timer = 0;
  private later = 0;
  private version: string | number = "";
  private others: Other[] = [];
  private why = ""; // why it opened at this step
  private readonly menu = h("span");
  private readonly note = h("span", { class: "quiet" });
  private readonly unseen = h("p", { class: "quiet" }, 'No gradients were recorded: add a probe such as "**:grad_output".');
  private readonly unsize: () => void;

  constructor(private readonly context: Context) {
    const options = (half: Half, label: string) => ({
      label,
      height: 250,
      log: true,
      gutter: 76,
      xName: (x: number) => this.nameAt(x),
      xTicks: (from: number, to: number, wanted: number) => ticks(from, to, wanted),
      hover: (x: number) => this.hovered(half, x),
    });
    this.charts = {
      forward: new Chart(options("forward", "Activations: standard deviation by depth")),
      backward: new Chart(options("backward", "Gradients: root mean square by depth")),
    };
    this.slider.addEventListener("input", () => this.moved());
    this.play.addEventListener("click", () => this.toggle());
    this.unsize = sized(this.element, () => this.resized());
  }

  update(params: Record<string, string>): void {
    if (!this.context.run.steps.count) return fill(this.element, nothingYet(this.context.run));
    fill(this.menu, overlayMenu(this.context, params));
    const key = `${this.context.run.version} ${otherRuns(params).join(" ")} ${params["rank"] ?? ""}`;
    if (this.version !== key) void this.load(params, key);
    else this.goTo(params["step"]);
  }

  refresh(run: RunInfo): void {
    this.context.run = run;
    this.update(this.context.router.route.params);
  }

  repaint(): void {
    this.draw();
  }

  key(event: KeyboardEvent): boolean {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === " ") this.toggle();
    else if (by !== undefined && event.target !== this.slider) this.set(this.at + by);
    else if (event.key === "Home" || event.key === "End") this.set(event.key === "Home" ? 0 : Infinity);
    else return false;
    return true;
  }

  close(): void {
    clearInterval(this.timer);
    clearTimeout(this.later);
    this.unsize();
    Object.values(this.charts).forEach((chart) => chart.close());
  }

  private resized(): void {
    for (const chart of Object.values(this.charts)) {
      chart.height = Math.max(200, Math.round((innerHeight - 260) / 2));
      chart.resize();
    }
  }

  private get at(): number {
    return Number(this.slider.value);
  }

  private async load(params: Record<string, string>, key: string): Promise<void> {
    this.version = key;
    const { source, run } = this.context;
    try {
      const asked = { width: WIDTH, rank: params["rank"] };
      const others = ask(source, otherRuns(params), "/api/depth", asked);
      others.catch(() => undefined); // said by the run's own answer, which is waited for first
      this.data = await source.columns("/api/depth", { ...asked, run: run.id, phase: phaseOf(run) });
      this.others = await others;
    } catch (error) {
      return fill(this.element, failed(error));
    }
    if (!this.names().length)
      return fill(
        this.element,
        empty(
          "No outputs or gradients were recorded",
          'Watch outputs (the default), and gradients with a probe such as "**:grad_output".',
        ),
      );
    this.furnish();
    this.goTo(params["step"]);
  }

  private furnish(): void {
    if (this.slider.isConnected) return;
    const controls = h("div", { class: "play" }, this.play, this.slider, this.told, this.note, this.menu);
    const note = h(
      "p",
      { class: "quiet" },
      "The line is this step, the band what all steps reach. A healthy network keeps both within a few powers of ten.",
    );
    fill(
      this.element,
      controls,
      HALVES.map(([half]) => this.charts[half].element),
      this.unseen,
      note,
      this.table.element,
    );
  }

  private names(): string[] {
    return this.data ? sitesOf(this.data) : [];
  }

  private goTo(step: string | undefined): void {
    const steps = this.data?.get("step") ?? [];
    this.slider.max = String(Math.max(0, steps.length - 1));
    let at = steps.length - 1;
    if (step !== undefined) while (at > 0 && steps[at]! > Number(step)) at--;
    else [at, this.why] = telling(this.data!, this.names().length);
    if (step !== undefined && this.timer === 0 && document.activeElement === this.slider) this.why = "";
    this.slider.value = String(at);
    this.draw();
  }

  private set(at: number): void {
    this.slider.value = String(Math.min(Math.max(0, at), Number(this.slider.max)));
    this.moved();
  }

  private moved(): void {
    this.why = "";
    this.draw();
    clearTimeout(this.later);
    const step = this.data?.get("step")[this.at];
    this.later = window.setTimeout(() => this.context.router.set({ step: step ?? null }), this.timer ? 600 : 150);
  }

  private toggle(): void {
    const playing = this.timer !== 0;
    clearInterval(this.timer);
    this.timer = playing ? 0 : window.setInterval(() => this.advance(), PACE);
    this.play.textContent = playing ? "▶ Play" : "❚❚ Pause";
    if (!playing && this.at >= Number(this.slider.max)) this.set(0);
  }

  private advance(): void {
    if (this.at >= Number(this.slider.max)) this.toggle();
    else this.set(this.at + 1);
  }

  private draw(): void {
    const { data } = this;
    if (!data) return;
    const sites = this.names().length;
    const span = { from: -0.5, to: sites - 0.5 };
    const depth = Float64Array.from({ length: sites }, (_, i) => i);
    for (const [half] of HALVES) {
      this.charts[half].remark = this.remark(half);
      this.charts[half].element.hidden = !data.get(half).some((value) => !Number.isNaN(value));
    }
    this.unseen.hidden = !this.charts.backward.element.hidden;
    for (const [half, name] of HALVES)
      this.charts[half].show(depth, this.series(data.get(half), sites, half, name), span);
    this.note.textContent = this.why;
    this.told.textContent = `step ${count(data.get("step")[this.at] ?? 0)}`;
    this.table.refresh();
  }

  private series(values: ArrayLike<number>, sites: number, half: Half, name: string): Series[] {
    const [low, high] = reach(values, sites);
    const now = Array.from({ length: sites }, (_, i) => values[this.at * sites + i] ?? NaN);
    const colour = token(half === "forward" ? "series" : "series-2");
    const edge = { colour: "transparent", width: 0, points: false, quiet: true };
    return [
      { name: "high", values: high, fillTo: "low", fill: `${colour}2e`, ...edge },
      { name: "low", values: low, ...edge },
      { name: this.others.length ? this.context.run.id : name, values: now, colour, width: 2, points: sites < 120 },
      ...this.overlaid(half),
    ];
  }

  /** The other runs at the step nearest to this one, site by site. */
  private overlaid(half: Half): Series[] {
    const step = this.data!.get("step")[this.at] ?? 0;
    return this.others.map(({ name, colour, data }) => {
      const steps = data.get("step");
      let at = steps.length - 1;
      while (at > 0 && steps[at]! > step) at--;
      const theirs = sitesOf(data);
      const index = new Map(theirs.map((site, i) => [site, i]));
      const pick = (site: string) => data.get(half)[at * theirs.length + (index.get(site) ?? -1)] ?? NaN;
      return { name, colour, values: this.names().map((site) => (index.has(site) ? pick(site) : NaN)), width: 1.5, points: false };
    });
  }

  /** What a logarithmic axis cannot show: zeros, and what is not finite. */
  private remark(half: Half): string {
    const names = this.names();
    const now = names.map((_, i) => this.data!.get(half)[this.at * names.length + i]!);
    const zero = names.filter((_, i) => now[i] === 0);
    const bad = names.filter((_, i) => Math.abs(now[i]!) === Infinity);
    return [listed("exactly 0", zero), listed("nothing finite", bad)].filter(Boolean).join("; ");
  }

  /** All of them are outputs, so the port says nothing. */
  private nameAt(x: number): string {
    const site = labelOf(this.names()[Math.round(x)] ?? "", this.context.run);
    return shortened(site.replace(/:output$/, "") || "(root)", 20);
  }

  private hovered(from: Half, x: number): void {
    this.charts[from === "forward" ? "backward" : "forward"].point(x);
  }

  private rows(): Rows {
    const names = this.names();
    const pick = (half: Half, i: number) => this.data?.get(half)[this.at * names.length + i] ?? null;
    return {
      head: ["depth", "site", "activations std", "gradients rms"],
      rows: names.map((name, i) => [i, name, pick("forward", i), pick("backward", i)]),
    };
  }
}

function sitesOf(data: Columns): string[] {
  const sites = (data.header["sites"] ?? []) as (string | { site: string })[];
  return sites.map((site) => (typeof site === "string" ? site : site.site));
}

/** The step that says most: the first with something not finite, else the one farthest from the usual, else the last. */
export function telling(data: Columns, sites: number): [number, string] {
  const steps = data.get("step").length;
  const halves = [data.get("forward"), data.get("backward")];
  const step = (at: number) => count(data.get("step")[at]!);
  for (let at = 0; at < steps; at++)
    if (halves.some((values) => values.subarray(at * sites, (at + 1) * sites).includes(Infinity as never)))
      return [at, `opened at step ${step(at)}: NaN or Inf begins here`];
  const scores = deviations(halves, steps, sites);
  const best = scores.indexOf(Math.max(...scores));
  const usual = [...scores].sort((a, b) => a - b)[Math.floor(steps / 2)] ?? 0;
  if (best < 0 || scores[best]! < Math.max(0.3, 3 * usual)) return [steps - 1, ""];
  return [best, `opened at step ${step(best)}: farthest from what is usual here`];
}

/** How many powers of ten each step lies from the sites' medians, in the mean of both directions. */
function deviations(halves: ArrayLike<number>[], steps: number, sites: number): number[] {
  const sums = new Array<number>(steps).fill(0);
  let known = 0;
  for (const values of halves)
    for (let i = 0; i < sites; i++) {
      const logs = Array.from({ length: steps }, (_, at) => Math.log10(values[at * sites + i]!));
      const finite = logs.filter(Number.isFinite).sort((a, b) => a - b);
      if (finite.length < 3) continue;
      const middle = finite[finite.length >> 1]!;
      known++;
      logs.forEach((log, at) => (sums[at] = sums[at]! + (Number.isFinite(log) ? Math.abs(log - middle) : 0)));
    }
  return sums.map((sum) => sum / Math.max(1, known));
}

function listed(what: string, names: string[]): string {
  const more = names.length > 3 ? ` and ${names.length - 3} more` : "";
  return names.length ? `${what}: ${names.slice(0, 3).join(", ")}${more}` : "";
}

/** The least and the greatest of every site over all steps. */
function reach(values: ArrayLike<number>, sites: number): [Float64Array, Float64Array] {
  const low = new Float64Array(sites).fill(NaN);
  const high = new Float64Array(sites).fill(NaN);
  for (let at = 0; at < values.length; at++) {
    const value = values[at]!;
    const i = at % sites;
    if (!(value > 0) || value === Infinity) continue;
    if (!(low[i]! <= value)) low[i] = value;
    if (!(high[i]! >= value)) high[i] = value;
  }
  return [low, high];
}

function ticks(from: number, to: number, wanted: number): number[] {
  const every = Math.max(1, Math.ceil((to - from) / Math.min(10, Math.floor(wanted))));
  const found: number[] = [];
  for (let at = Math.ceil(from); at <= to; at += every) found.push(at);
  return found;
}
