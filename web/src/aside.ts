// What stands beside the heat map: what was found, what the run is, what it did not see.

import { fill, h } from "./dom.ts";
import { card, facts, summary } from "./findings.ts";
import { count, date, many } from "./format.ts";
import { failed, loading } from "./states.ts";
import type { Counts, FindingGroup, Findings, RunInfo } from "./types.ts";
import type { Context } from "./view.ts";

const SHOWN = 40;
const DONE = ["nonfinite steps", "modules run again"]; // what `on_nonfinite=` saw and did: nothing is missing

export class Aside {
  readonly element: HTMLElement;
  private readonly list = h("div", { class: "findings" }, loading("what the rules found"));
  private readonly title = h("h2", {}, "Findings");
  private readonly about = h("div");

  constructor(
    private readonly context: Context,
    private readonly hover: (group: FindingGroup | null) => void,
  ) {
    this.element = h(
      "section",
      { class: "aside", "aria-label": "Findings and the run", tabindex: 0 },
      this.title,
      this.list,
      this.about,
    );
    this.refresh(context.run);
  }

  found(answer: Findings): void {
    this.title.textContent = summary(answer);
    const groups = answer.groups ?? [];
    const rest = groups.length - SHOWN;
    const more =
      rest > 0 && h("a", { href: this.context.router.link("findings", {}) }, `${many(rest, "more finding")}`);
    fill(
      this.list,
      groups.slice(0, SHOWN).map((group) => card(group, this.context, this.hover)),
      more,
    );
  }

  failed(error: unknown): void {
    fill(this.list, failed(error));
  }

  refresh(run: RunInfo): void {
    const counted = flat(run.counts);
    const lost = [...counted.filter(([name]) => !DONE.includes(name)), ...named(run.unseen)];
    const done = counted.filter(([name]) => DONE.includes(name));
    fill(
      this.about,
      h("h2", {}, "Run"),
      facts(told(run)),
      run.probes.length > 0 && h("h2", {}, "Kept"),
      run.probes.map((probe) => h("p", { class: "probe" }, probed(probe))),
      lost.length > 0 && h("h2", {}, "Not kept, not seen"),
      lost.length > 0 && facts(lost),
      done.length > 0 && h("h2", {}, "Counted"),
      done.length > 0 && facts(done),
    );
  }
}

function told(run: RunInfo): [string, unknown][] {
  const { first, last } = run.steps;
  const pairs: [string, unknown][] = [
    ["state", run.ended_by ? `${run.state}, ended by ${run.ended_by}` : run.state],
    ["steps", first === null ? "none" : `${count(run.steps.count)} (${count(first)}–${count(last)})`],
    ["sites", count(run.sites.length)],
    ["ranks", run.ranks.length > 1 ? count(run.ranks.length) : ""],
    ["started", date((run.about["started"] ?? run.about["created"]) as string)],
    ["commit", commit(run.about["git"])],
    ["folder", run.path],
  ];
  return pairs.filter(([, thing]) => thing !== "" && thing !== undefined);
}

function commit(git: unknown): string {
  const told = (git ?? {}) as { commit?: string; changed?: boolean };
  return told.commit ? `${told.commit.slice(0, 10)}${told.changed ? ", changed" : ""}` : "";
}

/** A probe in a line: which sites, what of them, when. */
function probed(probe: unknown): string {
  const { sites = [], keep = [], when = "" } = probe as { sites?: string[]; keep?: string[]; when?: string };
  return `${sites.join(", ")}: ${keep.join(", ").replace(/\(\)/g, "").toLowerCase()}; ${when}`;
}

/** What was not seen, by the names of sites, which are left as they are. */
export function named(unseen: Counts | null | undefined): [string, unknown][] {
  return Object.entries(unseen ?? {}).map(([site, why]) => [site || "(root)", why]);
}

/** Counts that are not zero, nested ones by their full names. */
export function flat(counts: Counts | null | undefined, prefix = ""): [string, unknown][] {
  return Object.entries(counts ?? {}).flatMap(([name, thing]): [string, unknown][] => {
    if (thing && typeof thing === "object" && !Array.isArray(thing)) return flat(thing as Counts, `${prefix}${name} `);
    return thing ? [[`${prefix}${name}`.replace(/_/g, " "), thing]] : [];
  });
}
