// The frame of all pages: which run, which page, whether it is live, the theme, the keyboard.

import { CostPage } from "./cost.ts";
import { Depth } from "./depth.ts";
import { DiffPage } from "./diff.ts";
import { fill, h, select } from "./dom.ts";
import { FindingsPage } from "./findings.ts";
import { many } from "./format.ts";
import { HarvestPage } from "./harvest.ts";
import { card, typing } from "./keys.ts";
import { Overview } from "./overview.ts";
import { type Page, type Route, Router } from "./router.ts";
import { RunsPage } from "./runs.ts";
import { SitePage } from "./site.ts";
import type { Source } from "./source.ts";
import { failed, loading } from "./states.ts";
import * as theme from "./theme.ts";
import { learn } from "./stats.ts";
import type { RunInfo, Runs } from "./types.ts";
import type { Context, View } from "./view.ts";

const TABS: readonly Page[] = ["overview", "site", "depth", "diff", "findings", "cost"];
const TITLED: readonly Page[] = ["site", "diff"]; // they have a heading of their own
const MAKERS: Record<Exclude<Page, "runs" | "harvest">, new (context: Context) => View> = {
  overview: Overview,
  site: SitePage,
  depth: Depth,
  diff: DiffPage,
  findings: FindingsPage,
  cost: CostPage,
};

export class Shell {
  private readonly router = new Router();
  private readonly bar = h("header", { class: "bar" });
  private readonly main = h("main");
  private readonly card = card();
  private runs: Runs = { folder: "", runs: [] };
  private run: RunInfo | null = null;
  private view: View | null = null;
  private shown = ""; // page, run and phase on screen
  private phase: string | undefined; // as the address named it when the run was read
  private lost = false;
  private silence: () => void = () => undefined;
  private asking = false;
  private again = false;

  constructor(
    root: HTMLElement,
    private readonly source: Source,
  ) {
    root.append(this.bar, this.main, this.card);
    theme.start(() => this.view?.repaint?.());
    this.router.listen((route) => void this.go(route));
    document.addEventListener("keydown", (event) => this.key(event));
  }

  async start(): Promise<void> {
    fill(this.main, loading("the runs"));
    try {
      this.runs = await this.source.json<Runs>("/api/runs", {});
      await this.go(this.router.route);
    } catch (error) {
      fill(this.main, failed(error));
    }
    this.drawBar();
  }

  private asked(): string | undefined {
    return this.router.route.params["phase"];
  }

  /** The run that the address names; without one, the only one there is. */
  private id(route: Route): string | null {
    const named = route.params["run"];
    if (named !== undefined) return named;
    return this.runs.runs.length === 1 ? this.runs.runs[0]!.id : null;
  }

  /** The harvest that the address names; without one, the only one there is, if there is nothing else. */
  private harvest(route: Route): string | null {
    const known = this.runs.harvests ?? [];
    if (route.page === "harvest") return route.params["harvest"] ?? known[0]?.id ?? "";
    return !this.runs.runs.length && known.length === 1 && route.page !== "runs" ? known[0]!.id : null;
  }

  private async go(route: Route): Promise<void> {
    const harvest = this.harvest(route);
    const id = harvest === null ? this.id(route) : harvest;
    const page = harvest !== null ? "harvest" : id === null ? "runs" : route.page;
    const key = `${page} ${id} ${route.params["phase"] ?? ""}`;
    if (key !== this.shown) await this.open(page, id, key);
    else this.view?.update(route.params);
    this.drawBar();
  }

  private async open(page: Page, id: string | null, key: string): Promise<void> {
    this.shown = key;
    this.view?.close();
    this.view = null;
    if (page === "runs" || id === null) return this.list();
    if (page === "harvest") {
      this.view = new HarvestPage(this.source, this.router, id);
      fill(this.main, this.view.element);
      return this.view.update(this.router.route.params);
    }
    try {
      if (this.run?.id !== id || this.phase !== this.asked()) await this.read(id);
      if (this.shown !== key || !this.run) return;
      this.view = new MAKERS[page]({ source: this.source, router: this.router, run: this.run, runs: this.runs.runs });
      const heading = TITLED.includes(page) ? null : h("h1", { class: "unseen" }, `${title(page)} of ${this.run.id || "the run"}`);
      fill(this.main, heading, this.view.element);
      this.view.update(this.router.route.params);
    } catch (error) {
      this.run = null;
      this.shown = "";
      fill(this.main, failed(error), h("p", { class: "state" }, h("a", { href: "#/runs" }, "All runs")));
    }
  }

  private list(): void {
    const page = new RunsPage(this.runs, this.source);
    fill(this.main, page.element);
    this.view = page;
  }

  private async read(id: string): Promise<void> {
    this.silence();
    fill(this.main, loading("the run"));
    this.phase = this.asked();
    this.run = await this.source.json<RunInfo>("/api/run", { run: id, phase: this.phase, ahead: this.ahead() });
    learn(this.run.labels);
    document.title = `${this.run.id || "run"} · tensortap`;
    this.silence = this.source.live ? this.listen(id) : () => undefined;
  }

  /** The statistic that the overview will ask for: a server begins to read it before it is asked. */
  private ahead(): string | undefined {
    const { page, params } = this.router.route;
    return this.source.live && page === "overview" ? (params["stat"] ?? "std") : undefined;
  }

  private listen(id: string): () => void {
    const changed = (event: { version: string | number; state: string }) => {
      if (this.run && (event.version !== this.run.version || event.state !== this.run.state)) void this.renew(id);
    };
    const lost = (gone: boolean) => {
      this.lost = gone;
      this.drawBar();
    };
    return this.source.events(id, changed, lost);
  }

  /** Read the run again; once more if it changed meanwhile, but never two at a time. */
  private async renew(id: string): Promise<void> {
    this.again = this.asking;
    if (this.asking) return;
    this.asking = true;
    try {
      const run = await this.source.json<RunInfo>("/api/run", { run: id, phase: this.phase });
      if (this.run?.id !== id) return;
      this.run = run;
      this.view?.refresh(run);
      this.drawBar();
    } catch {
      this.lost = true;
      this.drawBar();
    } finally {
      this.asking = false;
    }
    if (this.again) await this.renew(id);
  }

  private drawBar(): void {
    const { page } = this.router.route;
    const id = this.harvest(this.router.route) === null ? this.id(this.router.route) : null;
    const tabs =
      id === null
        ? []
        : TABS.map((name) => h("a", { href: this.tab(name), "aria-current": name === page && "page" }, title(name)));
    fill(
      this.bar,
      h(
        "a",
        { class: "brand", href: this.runs.runs.length > 1 || this.runs.harvests?.length ? "#/runs" : this.router.link("overview", {}) },
        "tensortap",
      ),
      this.chooser(id),
      this.run && id !== null ? this.badge(this.run) : null,
      this.run && id !== null ? this.phases(this.run) : null,
      h("nav", { "aria-label": "Pages" }, tabs),
      h("span", { class: "space" }),
      h("button", { type: "button", class: "small", onclick: () => this.theme() }, theme.name()),
      h(
        "button",
        { type: "button", class: "small", onclick: () => this.card.showModal(), "aria-label": "Keyboard and mouse" },
        "?",
      ),
    );
  }

  private tab(name: Page): string {
    const { params } = this.router.route;
    const kept = {
      from: params["from"],
      to: params["to"],
      step: params["step"],
      site: params["site"],
      a: params["a"],
      b: params["b"],
      with: params["with"],
      rank: params["rank"],
      y: params["y"],
      smooth: params["smooth"],
    };
    return this.router.link(name, kept);
  }

  private chooser(id: string | null): HTMLElement | null {
    if (this.runs.runs.length < 2) return id ? h("b", {}, id) : null;
    const names = this.runs.runs.map((run) => run.id);
    const element = select(
      "Run",
      id === null ? [["", "choose a run"], ...names.map((name) => [name, name] as const)] : names,
      id ?? "",
      (value) => this.router.go(id === null ? "overview" : this.router.route.page, { run: value, phase: null }),
    );
    element.classList.add("run");
    return element;
  }

  private badge(run: RunInfo): HTMLElement {
    if (this.lost)
      return h("span", { class: "badge lost", title: "Start it again with: tensortap view RUN" }, "server gone");
    const state = run.ended_by && run.state !== "crashed" ? `ended by ${run.ended_by}` : run.state;
    return h("span", { class: `badge ${run.ended_by ? "crashed" : run.state}` }, `${state}, ${many(run.steps.count, "step")}`);
  }

  /** Training and evaluation apart; a report holds one of them. */
  private phases(run: RunInfo): HTMLElement | null {
    if (run.phases.length < 2) return null;
    if (!this.source.live) return h("span", { class: "quiet" }, phaseName(run.phase));
    const names = [...run.phases, "all"].map((name) => [name, phaseName(name)] as const);
    return select("Phase", names, run.phase || "all", (phase) =>
      this.router.go(this.router.route.page, { ...this.router.route.params, phase, from: null, to: null, step: null }),
    );
  }

  private theme(): void {
    theme.next();
    this.view?.repaint?.();
    this.drawBar();
  }

  /** Back to where one came from; a page that was opened by its address goes to the overview. */
  private back(): void {
    if (this.router.route.page === "overview" || this.id(this.router.route) === null) return;
    if (this.router.moved) history.back();
    else location.hash = this.tab("overview");
  }

  private key(event: KeyboardEvent): void {
    if (typing(event) || this.card.open || event.ctrlKey || event.metaKey || event.altKey) return;
    const tab = TABS[Number(event.key) - 1];
    if (this.view?.key?.(event)) event.preventDefault();
    else if (event.key === "?") this.card.showModal();
    else if (event.key === "t") this.theme();
    else if (event.key === "Escape") this.back();
    else if (tab && this.run) location.hash = this.tab(tab);
  }
}

function phaseName(phase: string): string {
  return { train: "training", eval: "evaluation", "": "all phases", all: "all phases" }[phase] ?? phase;
}

function title(name: string): string {
  return name[0]!.toUpperCase() + name.slice(1);
}
