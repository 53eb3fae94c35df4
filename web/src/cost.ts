// What observing cost, what was thinned, what was not seen.

import { flat, named } from "./aside.ts";
import { fill, h } from "./dom.ts";
import { facts } from "./findings.ts";
import { count, many, seconds, share } from "./format.ts";
import { failed, loading } from "./states.ts";
import type { Cost, CostSite, RunInfo } from "./types.ts";
import { type Context, labelOf, type View } from "./view.ts";

const SHOWN = 200;

export class CostPage implements View {
  readonly element = h("div", { class: "page read" }, loading("what observing cost"));

  constructor(private readonly context: Context) {}

  update(): void {
    void this.load();
  }

  refresh(run: RunInfo): void {
    this.context.run = run;
    void this.load();
  }

  close(): void {}

  private async load(): Promise<void> {
    try {
      this.draw(await this.context.source.json<Cost>("/api/cost", { run: this.context.run.id }));
    } catch (error) {
      fill(this.element, failed(error));
    }
  }

  private draw(cost: Cost): void {
    fill(
      this.element,
      h("section", {}, h("h2", {}, "What observing cost"), h("p", {}, headline(cost))),
      cost.sites.length > 0 && h("section", {}, h("h2", {}, "By site"), this.table(cost.sites)),
      section("What was thinned or dropped", flat(cost.thinned), "Nothing: every step that was asked for was kept."),
      section("What was not seen", named(cost.unseen), "Nothing is known to have been missed."),
      section("Counted in the run", flat(this.context.run.counts), "Nothing was counted."),
    );
  }

  private table(sites: CostSite[]): HTMLElement {
    const ordered = [...sites].sort((a, b) => b.seconds - a.seconds).slice(0, SHOWN);
    const most = ordered[0]?.seconds || 1;
    const rows = ordered.map((site) =>
      h(
        "tr",
        {},
        h("td", { class: "wrap" }, h("a", { href: this.context.router.link("site", { site: site.site }) }, labelOf(site.site, this.context.run))),
        h("td", { class: "number" }, seconds(site.seconds)),
        h("td", { class: "number" }, share(site.share)),
        h("td", { class: "compared" }, h("i", { class: "meter", style: `width: ${(site.seconds / most) * 220}px` })),
      ),
    );
    const head = h(
      "thead",
      {},
      h(
        "tr",
        {},
        ["site", "time", "share", "compared"].map((name) => h("th", { scope: "col", class: name === "compared" ? name : null }, name)),
      ),
    );
    const note =
      sites.length > SHOWN
        ? [h("p", { class: "quiet" }, `The ${SHOWN} dearest of ${many(sites.length, "site")}.`)]
        : [];
    return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Cost by site" }, h("table", {}, head, h("tbody", {}, rows)), ...note);
  }
}

function headline(cost: Cost): string {
  if (cost.seconds === null || cost.seconds === undefined)
    return "The run does not say: it is live, or it ended without being closed.";
  const part = cost.share === null ? "" : `, ${share(cost.share)} of the time of the steps`;
  return `${seconds(cost.seconds)} in all${part}; ${count(cost.sites.length)} sites measured.`;
}

function section(title: string, pairs: [string, unknown][], none: string): HTMLElement {
  return h("section", {}, h("h2", {}, title), pairs.length ? facts(pairs) : h("p", { class: "quiet" }, none));
}
