// A harvest: its sites, the histogram and spectrum of one, its dimensions, and the samples that activate one most.

import { Chart } from "./chart.ts";
import { token } from "./colours.ts";
import type { Columns } from "./columns.ts";
import { fill, h, select, sized } from "./dom.ts";
import { facts } from "./findings.ts";
import { count, many, number, share } from "./format.ts";
import type { Router } from "./router.ts";
import { aborted, type Source } from "./source.ts";
import { failed, loading } from "./states.ts";
import { type Rows, Table, wide } from "./table.ts";
import type { View } from "./view.ts";

interface HarvestSite {
  site: string;
  width: number;
  dtype: string;
  top_k: number;
  rows: number;
  finite: number;
  nonfinite: number;
  mean?: number;
  std?: number;
  min?: number;
  max?: number;
  zeros?: number;
  dead_count: number;
  dense_count: number;
}

interface HarvestInfo {
  id: string;
  path: string;
  complete: boolean;
  rows: number;
  samples: number;
  set_aside: { sample: number; why: string }[];
  plan: Record<string, unknown>;
  sites: HarvestSite[];
  text: boolean;
}

interface SiteHeader extends HarvestSite {
  low: number;
  high: number;
  dead: number[];
  dense: number[];
  spectrum: number[];
}

interface Activation {
  value: number;
  sample: number;
  position: number;
  token: number;
  text: string;
  around: [string, string, string];
}

const SHOWN = 60; // dimensions that are listed by their numbers
const HEAD = ["site", "rows", "width", "dtype", "mean", "std", "min", "max", "not finite", "dead", "dense"];

export class HarvestPage implements View {
  readonly element = h("div", { class: "page" }, loading("the harvest"));
  private readonly spectrum: Chart;
  private readonly spread: Chart;
  private readonly top = h("div");
  private readonly input = h("input", { type: "number", min: 0, "aria-label": "Dimension" });
  private info: HarvestInfo | null = null;
  private data: Columns | null = null;
  private params: Record<string, string> = {};
  private shown = ""; // the site that is drawn
  private under = 0; // the dimension under the mouse
  private listed = ""; // the site and dimension whose samples are drawn
  private asked = new AbortController();
  private readonly unsize: () => void;

  constructor(
    private readonly source: Source,
    private readonly router: Router,
    private readonly id: string,
  ) {
    const axis = { height: 200, gutter: 72, right: 8 };
    this.spectrum = new Chart({
      label: "Variance along principal axes, added up",
      ...axis,
      range: [0, 1.02],
      format: share,
      xName: (x) => (x >= 1 ? `axis ${count(x)}` : ""),
    });
    this.spread = new Chart({
      label: "Standard deviation of every dimension",
      ...axis,
      xName: (x) => `dimension ${count(x)}`,
      hover: (x) => (this.under = Number.isNaN(x) ? this.under : Math.max(0, Math.round(x))),
    });
    this.input.addEventListener("change", () => this.choose(Number(this.input.value)));
    this.spread.element.addEventListener("click", () => this.choose(this.under));
    this.unsize = sized(this.element, () => [this.spectrum, this.spread].forEach((chart) => chart.resize()));
    void this.read();
  }

  update(params: Record<string, string>): void {
    this.params = params;
    if (this.info) void this.load();
  }

  refresh(): void {}

  repaint(): void {
    this.draw();
  }

  close(): void {
    this.asked.abort();
    this.unsize();
    this.spectrum.close();
    this.spread.close();
  }

  private async read(): Promise<void> {
    try {
      this.info = await this.source.json<HarvestInfo>("/api/harvest", { harvest: this.id });
      document.title = `${this.info.id} · tensortap`;
      await this.load();
    } catch (error) {
      fill(this.element, failed(error));
    }
  }

  private site(): string {
    return this.params["site"] ?? this.info!.sites[0]!.site;
  }

  private dimension(): number {
    return Number(this.params["dimension"] ?? this.widest()) || 0;
  }

  /** The dimension that varies most: what one looks at first. */
  private widest(): number {
    const spread = Array.from(this.data?.find("std") ?? []);
    return spread.reduce((best, value, i) => (value > spread[best]! ? i : best), 0);
  }

  private async load(): Promise<void> {
    const site = this.site();
    try {
      if (this.shown !== site) {
        this.asked.abort();
        const { signal } = (this.asked = new AbortController());
        fill(this.element, this.title(), loading(site));
        this.data = await this.source.columns("/api/harvest/site", { harvest: this.id, site }, signal);
        this.shown = site;
        this.listed = "";
        this.furnish();
      }
      await this.list();
    } catch (error) {
      if (!aborted(error)) fill(this.element, this.title(), failed(error));
    }
  }

  private title(): HTMLElement {
    const info = this.info!;
    const state = info.complete ? "" : " · not complete";
    const told = `${many(info.rows, "row")} of ${many(info.samples, "sample")}${state}`;
    return h("div", { class: "title" }, h("h1", {}, info.id), h("span", { class: "quiet" }, told));
  }

  private furnish(): void {
    const info = this.info!;
    const head = this.data!.header as unknown as SiteHeader;
    const aside = info.set_aside.length
      ? h(
          "p",
          { class: "finding warning" },
          `${many(info.set_aside.length, "sample")} set aside: `,
          info.set_aside
            .slice(0, 5)
            .map((each) => `${each.sample} (${each.why})`)
            .join("; "),
        )
      : null;
    fill(
      this.element,
      this.title(),
      aside,
      this.sites(),
      h("div", { class: "tools", style: "margin-top: 14px" }, this.choosers()),
      h(
        "div",
        { class: "grid two" },
        h(
          "section",
          { class: "panel" },
          h("h2", {}, head.site),
          this.bars(head),
          this.spectrumOf(head),
          head.top_k ? h("p", { class: "quiet" }, "Only the largest elements of each row were kept.") : null,
        ),
        h(
          "section",
          { class: "panel" },
          h("h2", {}, "Dimensions"),
          this.spread.element,
          h("p", { class: "quiet" }, "Click a dimension to see what activates it."),
          this.numbers("dead: the same in every row", head.dead),
          this.numbers("dense: positive in every row", head.dense),
          new Table("statistics of every dimension", () => this.rows()).element,
        ),
      ),
      h("section", { class: "panel", style: "margin-top: 18px" }, this.top),
      h("details", { class: "table" }, h("summary", {}, "How it was made"), facts(Object.entries(info.plan))),
    );
    this.draw();
  }

  private sites(): HTMLElement {
    const row = (site: HarvestSite) => {
      const cells = [site.mean, site.std, site.min, site.max].map((value) => h("td", { class: "number" }, number(value)));
      const counts = [site.nonfinite, site.dead_count, site.dense_count];
      return h(
        "tr",
        {},
        h("td", { class: "wrap" }, h("a", { href: this.link({ site: site.site, dimension: null }) }, site.site)),
        h("td", { class: "number" }, count(site.rows)),
        h("td", { class: "number" }, count(site.width)),
        h("td", {}, site.dtype),
        cells,
        counts.map((value) => h("td", { class: "number" }, count(value))),
      );
    };
    const head = h("thead", {}, h("tr", {}, HEAD.map((name) => h("th", { scope: "col" }, name))));
    return wide("Sites", h("table", {}, head, h("tbody", {}, this.info!.sites.map(row))));
  }

  private choosers(): HTMLElement[] {
    const info = this.info!;
    const names = info.sites.map((site) => site.site);
    const chooser = select("Site", names, this.site(), (site) => this.router.set({ site, dimension: null }, true));
    return [h("label", {}, "site", chooser), h("label", {}, "dimension", this.input)];
  }

  private choose(dimension: number): void {
    this.router.set({ dimension }, true);
  }

  private link(patch: Record<string, string | null>): string {
    return this.router.link("harvest", { harvest: this.params["harvest"], ...patch });
  }

  /** The histogram of all elements: a bar for each of equal steps between the least and the greatest. */
  private bars(head: SiteHeader): HTMLElement {
    const counts = this.data!.get("counts");
    const most = Math.max(1, ...Array.from(counts));
    const step = (head.high - head.low) / counts.length;
    const named = (i: number) =>
      `${number(head.low + i * step, 3)} … ${number(head.low + (i + 1) * step, 3)}: ${count(counts[i]!)}`;
    const bars = Array.from(counts, (value, i) =>
      h("i", { style: `height: ${value ? Math.max(1, (100 * Math.log1p(value)) / Math.log1p(most)) : 0}%`, title: named(i) }),
    );
    const table = new Table("histogram of all elements", () => ({
      head: ["from", "to", "elements"],
      rows: Array.from(counts, (value, i) => [head.low + i * step, head.low + (i + 1) * step, value]),
    }));
    return h(
      "figure",
      { class: "chart", "aria-label": "Histogram of all elements" },
      h("div", { class: "chart-readout" }, h("span", { class: "chart-title" }, "Histogram of all elements"), h("span", { class: "quiet" }, "logarithmic")),
      h("div", { class: "harvest-bars", role: "img", "aria-label": "Histogram of all elements" }, bars),
      h("div", { class: "harvest-ends quiet" }, h("span", {}, number(head.low)), h("span", {}, number(head.high))),
      table.element,
    );
  }

  private spectrumOf(head: SiteHeader): HTMLElement {
    if (!head.spectrum.length) return h("p", { class: "quiet" }, "There is no spectrum of this site.");
    const sums = added(head.spectrum);
    const most = sums.findIndex((sum) => sum >= 0.9) + 1;
    const told = most
      ? `${count(most)} ${most === 1 ? "axis" : "axes"} of ${count(head.width)} hold 90 % of the variance.`
      : `The ${count(sums.length)} largest of ${count(head.width)} axes hold ${share(sums[sums.length - 1])} of the variance.`;
    const table = new Table("variance along principal axes", () => ({
      head: ["axis", "share", "added up"],
      rows: head.spectrum.map((value, i) => [i + 1, value, sums[i]!]),
    }));
    return h("div", {}, this.spectrum.element, h("p", { class: "quiet" }, told), table.element);
  }

  private numbers(label: string, dimensions: number[]): HTMLElement {
    const chips = dimensions.slice(0, SHOWN).map((i) => h("a", { href: this.link({ site: this.shown, dimension: String(i) }) }, count(i)));
    const more = dimensions.length > SHOWN ? ` and ${count(dimensions.length - SHOWN)} more` : "";
    return h("div", { class: "chips" }, h("span", { class: "quiet" }, `${many(dimensions.length, "dimension")} ${label}`), chips, more);
  }

  private draw(): void {
    if (!this.data || !this.shown) return;
    const head = this.data.header as unknown as SiteHeader;
    const colour = token("series");
    const axes = [0, ...head.spectrum.map((_, i) => i + 1)];
    if (head.spectrum.length)
      this.spectrum.show(axes, [{ name: "share of the variance", values: [0, ...added(head.spectrum)], colour }], {
        from: 0,
        to: head.spectrum.length + 0.5,
      });
    const dimensions = Array.from({ length: head.width }, (_, i) => i);
    this.spread.show(dimensions, [{ name: "std", values: this.data.get("std"), colour, width: 1 }], {
      from: -0.5,
      to: head.width - 0.5,
    });
  }

  private rows(): Rows {
    const data = this.data!;
    const names = ["mean", "std", "min", "max", "positive", "zero", "nonfinite"];
    const width = data.get("mean").length;
    return {
      head: ["dimension", ...names],
      rows: Array.from({ length: width }, (_, i) => [i, ...names.map((name) => data.get(name)[i] ?? null)]),
    };
  }

  private async list(): Promise<void> {
    const [site, dimension] = [this.site(), this.dimension()];
    if (this.listed === `${site} ${dimension}`) return;
    this.listed = `${site} ${dimension}`;
    this.input.value = String(dimension);
    const title = h("h2", {}, `What activates dimension ${count(dimension)} most`);
    fill(this.top, title, loading("the samples"));
    try {
      const found = await this.source.json<{ rows: Activation[] }>("/api/harvest/top", { harvest: this.id, site, dimension });
      if (this.listed === `${site} ${dimension}`) fill(this.top, title, this.activations(found.rows));
    } catch (error) {
      fill(this.top, title, failed(error));
    }
  }

  private activations(rows: Activation[]): HTMLElement {
    if (!rows.length) return h("p", { class: "quiet" }, "No row holds a value of this dimension.");
    const text = this.info!.text;
    const names = ["value", "sample", "position", "token", ...(text ? ["text"] : [])];
    const most = Math.max(...rows.map((row) => Math.abs(row.value))) || 1;
    const body = rows.map((row) =>
      h(
        "tr",
        {},
        h("td", { class: "number" }, number(row.value), " ", h("i", { class: "meter", style: `width: ${(Math.abs(row.value) / most) * 60}px` })),
        h("td", { class: "number" }, count(row.sample)),
        h("td", { class: "number" }, row.position < 0 ? "" : count(row.position)),
        h("td", { class: "number" }, row.token < 0 ? "" : count(row.token)),
        text ? h("td", { class: "wrap" }, told(row)) : null,
      ),
    );
    const hint = text
      ? null
      : h("p", { class: "quiet" }, "With a tokenizer the text is shown: ", h("code", {}, "tensortap view ACTS --tokenizer tokenizer.json"));
    const head = h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
    return h("div", {}, wide("Samples", h("table", {}, head, h("tbody", {}, body))), hint);
  }
}

/** The text around a token, which stands out. */
function told(row: Activation): (string | HTMLElement)[] {
  const [before, itself, after] = row.around;
  return itself ? [before, " ", h("mark", {}, itself), " ", after] : [row.text];
}

function added(shares: number[]): number[] {
  let sum = 0;
  return shares.map((value) => (sum += value));
}
