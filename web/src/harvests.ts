// The harvests of a folder, in a table below the list of runs.

import { h } from "./dom.ts";
import { count } from "./format.ts";
import { wide } from "./table.ts";

export interface HarvestSummary {
  id: string;
  complete?: boolean;
  rows?: number;
  samples?: number;
  sites?: number;
  model?: string | null;
  error?: string;
}

/** The harvests of a folder, for the list of runs. */
export function harvestTable(harvests: HarvestSummary[]): HTMLElement {
  const head = ["harvest", "state", "rows", "samples", "sites", "model"];
  const row = (each: HarvestSummary) =>
    h(
      "tr",
      {},
      h("td", {}, h("a", { href: `#/harvest?harvest=${encodeURIComponent(each.id)}` }, each.id)),
      h("td", { class: "wrap" }, each.error ?? (each.complete ? "complete" : "not complete")),
      [each.rows, each.samples, each.sites].map((value) => h("td", { class: "number" }, count(value))),
      h("td", {}, each.model ?? ""),
    );
  return h(
    "section",
    {},
    h("h2", {}, "Harvests"),
    wide("Harvests", h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, harvests.map(row)))),
  );
}
