// All state of the page lives in the address: #/page?key=value. Every state is a deep link, and Back goes back.

export const PAGES = ["runs", "overview", "site", "depth", "diff", "findings", "cost", "harvest"] as const;
export type Page = (typeof PAGES)[number];

export interface Route {
  page: Page;
  params: Record<string, string>;
}

export type Patch = Record<string, string | number | null | undefined>;

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const page = PAGES.find((name) => name === path) ?? "overview";
  return { page, params: Object.fromEntries(new URLSearchParams(query)) };
}

export function format(page: Page, params: Patch): string {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = kept.map(([key, value]) => `${key}=${readable(String(value))}`).join("&");
  return `#/${page}${query ? `?${query}` : ""}`;
}

/** Encoded only where it must be, so that a site in an address can still be read. */
function readable(text: string): string {
  return encodeURIComponent(text).replace(/%3A/g, ":").replace(/%2F/g, "/").replace(/%5B/g, "[").replace(/%5D/g, "]");
}

export class Router {
  route: Route = parse(location.hash);
  moved = false; // whether there is a page of ours to go back to
  private readonly heard: ((route: Route, before: Route) => void)[] = [];

  constructor() {
    addEventListener("hashchange", () => {
      this.moved = true;
      this.tell(parse(location.hash));
    });
  }

  listen(hear: (route: Route, before: Route) => void): void {
    this.heard.push(hear);
  }

  /** Another page, or another state of it; what is set to null goes. The run and the phase stay unless named. */
  go(page: Page, params: Patch): void {
    location.hash = this.link(page, params);
  }

  link(page: Page, params: Patch): string {
    return format(page, { run: this.route.params["run"], phase: this.route.params["phase"], ...params });
  }

  /** A change of this page's state; without `keep` it takes the place of the present entry in the history. */
  set(patch: Patch, keep = false): void {
    const hash = format(this.route.page, { ...this.route.params, ...patch });
    if (hash === location.hash) return;
    if (keep) location.hash = hash;
    else {
      history.replaceState(null, "", hash);
      this.tell(parse(hash));
    }
  }

  private tell(route: Route): void {
    const before = this.route;
    this.route = route;
    for (const hear of this.heard) hear(route, before);
  }
}
